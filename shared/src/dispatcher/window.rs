//! How much may be let in, and in which portions: pure arithmetic.

use std::collections::{BTreeSet, HashMap};

use crate::domain::GraphVersion;
use crate::queue::Job;

/// The room in the lanes of a pool and class: one of all declarative graphs (none), which every
/// worker reads, and one of each code version.
#[derive(Debug)]
pub(super) struct Window {
    size: usize,
    unread: HashMap<Option<GraphVersion>, usize>,
    /// Versions that get nothing in this round.
    full: BTreeSet<GraphVersion>,
}

impl Window {
    /// A window of `size` unread jobs per lane. A version whose lane is half full sits this round
    /// out: its last places must not make everybody's portions small.
    pub(super) fn new(size: usize, unread: impl Iterator<Item = (Option<GraphVersion>, usize)>) -> Self {
        let unread: HashMap<_, _> = unread.collect();
        let full = unread.iter().filter(|(_, unread)| **unread * 2 > size);
        let full = full.filter_map(|(version, _)| version.clone()).collect();
        Self { size, unread, full }
    }

    /// Whether it is worth filling: not before half of it was read, so that one question to the
    /// backlog brings several jobs; the other half keeps the workers busy meanwhile. `known` names
    /// the lanes of the backlog, where that is certain enough.
    pub(super) fn is_low(&self, known: Option<&BTreeSet<Option<GraphVersion>>>) -> bool {
        let is_low = |lane: &Option<GraphVersion>| self.unread.get(lane).is_none_or(|unread| unread * 2 <= self.size);
        // Steps of declarative graphs cannot be told apart, so their lane is everybody's limit.
        is_low(&None) && known.is_none_or(|known| known.is_empty() || known.iter().any(is_low))
    }

    /// Jobs that may come next, whichever lanes they belong to.
    pub(super) fn room(&self) -> usize {
        let takes = |(lane, unread): (&Option<GraphVersion>, &usize)| {
            let is_open = lane.as_ref().is_none_or(|version| !self.full.contains(version));
            is_open.then(|| self.size.saturating_sub(*unread))
        };
        self.unread.iter().filter_map(takes).min().unwrap_or(self.size)
    }

    /// Versions whose lanes take nothing more.
    pub(super) fn full(&self) -> Vec<GraphVersion> {
        self.full.iter().cloned().collect()
    }

    pub(super) fn add(&mut self, jobs: &[Job]) {
        for job in jobs {
            let unread = self.unread.entry(job.lane.graph.clone()).or_default();
            *unread += 1;
            if *unread >= self.size {
                self.full.extend(job.lane.graph.clone());
            }
        }
    }
}

/// How many tenants get how many steps each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Share {
    tenants: usize,
    each: usize,
    /// These are all tenants there are.
    is_everybody: bool,
}

impl Share {
    /// The first portion: as many tenants as steps each, for the backlog may be of any shape.
    pub(super) fn first(room: usize) -> Self {
        Self::of(room, room.isqrt())
    }

    /// The next portion, for what the last one showed.
    pub(super) fn next(self, room: usize, picked: &Picked, from_start: bool) -> Self {
        if from_start && picked.tenants < self.tenants {
            let tenants = picked.tenants.clamp(1, room.max(1));
            return Self { tenants, each: (room / tenants).max(1), is_everybody: tenants == picked.tenants };
        }
        Self::of(room, picked.most.clamp(1, room.isqrt().max(1)))
    }

    fn of(room: usize, each: usize) -> Self {
        let each = each.max(1);
        Self { tenants: (room / each).max(1), each, is_everybody: false }
    }

    pub(super) fn tenants(self) -> u32 {
        u32::try_from(self.tenants).unwrap_or(u32::MAX)
    }

    pub(super) fn each(self) -> u32 {
        u32::try_from(self.each).unwrap_or(u32::MAX)
    }
}

/// Whose steps a portion brought.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Picked {
    tenants: usize,
    /// The most steps of one tenant.
    most: usize,
    last: String,
}

impl Picked {
    /// From the tenant of each step, in any order.
    pub(super) fn new<'a>(steps: impl Iterator<Item = &'a str>) -> Self {
        let mut counts: HashMap<&str, usize> = HashMap::new();
        steps.for_each(|tenant| *counts.entry(tenant).or_default() += 1);
        Self {
            tenants: counts.len(),
            most: counts.values().copied().max().unwrap_or_default(),
            last: counts.keys().max().copied().unwrap_or_default().to_owned(),
        }
    }

    /// Whether a portion taken from the first tenant on left nothing behind.
    pub(super) fn is_all(&self, share: Share) -> bool {
        self.tenants < share.tenants && self.most < share.each
    }

    /// Behind which tenant the next portion begins; empty to begin again.
    pub(super) fn next_after(&self, share: Share) -> String {
        let has_more = self.tenants >= share.tenants && !share.is_everybody;
        if has_more { self.last.clone() } else { String::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(name: &str) -> Option<GraphVersion> {
        Some(GraphVersion::from(name))
    }

    fn window(unread: &[(Option<GraphVersion>, usize)]) -> Window {
        Window::new(16, unread.iter().cloned())
    }

    #[test]
    fn a_window_is_filled_when_half_of_it_was_read() {
        assert!(window(&[(None, 8)]).is_low(None));
        assert!(!window(&[(None, 9)]).is_low(None));
        assert_eq!(window(&[(None, 5)]).room(), 11);
    }

    #[test]
    fn a_lane_that_nobody_reads_does_not_stop_the_others() {
        let window = window(&[(None, 0), (version("c-gone"), 15), (version("c-new"), 6)]);

        assert!(window.is_low(Some(&BTreeSet::from([version("c-gone"), version("c-new")]))));
        assert_eq!(window.full(), [GraphVersion::from("c-gone")]);
        assert_eq!(window.room(), 10);
    }

    #[test]
    fn lanes_that_are_all_full_are_left_alone_unless_there_may_be_others() {
        let window = window(&[(None, 0), (version("c-1"), 16)]);

        assert!(!window.is_low(Some(&BTreeSet::from([version("c-1")]))));
        assert!(window.is_low(None));
    }

    #[test]
    fn a_long_backlog_of_one_tenant_takes_few_questions() {
        let first = Share::first(16);
        let picked = Picked::new(["a"; 4].into_iter());
        assert_eq!((first.tenants(), first.each()), (4, 4));
        assert!(!picked.is_all(first));

        let second = first.next(12, &picked, true);

        assert_eq!((second.tenants(), second.each()), (1, 12));
        assert_eq!(Picked::new(["a"; 12].into_iter()).next_after(second), "");
    }

    #[test]
    fn many_tenants_with_a_step_each_take_few_questions() {
        let first = Share::first(16);
        let picked = Picked::new(["a", "b", "c", "d"].into_iter());

        assert_eq!(picked.next_after(first), "d");
        let second = first.next(12, &picked, true);

        assert_eq!((second.tenants(), second.each()), (12, 1));
    }

    #[test]
    fn the_last_step_of_the_backlog_ends_the_round() {
        assert!(Picked::new(["a"].into_iter()).is_all(Share::first(16)));
        assert!(Picked::new([].into_iter()).is_all(Share::first(1)));
        assert!(!Picked::new(["a"].into_iter()).is_all(Share::first(1)));
    }
}
