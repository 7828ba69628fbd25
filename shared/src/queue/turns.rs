//! In which order a worker reads its lanes: class by class, lanes of one class in turn, with a
//! share of the jobs kept for the last class.

use super::Lane;

/// One job in so many comes from the last class while it has any.
const SHARE: usize = 8;

/// The order of reading; remembers what was taken.
#[derive(Debug)]
pub(super) struct Turns {
    /// Indexes into the worker's lanes, by class in the order the classes were named.
    classes: Vec<Vec<usize>>,
    /// Moves on with every read, so that no lane of a class is always first.
    reads: usize,
    /// Jobs taken since the last class had one.
    since_last: usize,
}

impl Turns {
    /// The turns of a worker that reads `lanes`.
    pub(super) fn new(lanes: &[Lane]) -> Self {
        let mut classes: Vec<(i16, Vec<usize>)> = Vec::new();
        for (index, lane) in lanes.iter().enumerate() {
            match classes.iter_mut().find(|(class, _)| *class == lane.class) {
                Some((_, members)) => members.push(index),
                None => classes.push((lane.class, vec![index])),
            }
        }
        let classes = classes.into_iter().map(|(_, members)| members).collect();
        Self { classes, reads: 0, since_last: 0 }
    }

    /// What to read next: lanes in order, each with the most jobs to take from it.
    pub(super) fn plan(&mut self, max: usize) -> Vec<(usize, usize)> {
        self.reads = self.reads.wrapping_add(1);
        let rotated = |members: &Vec<usize>| {
            let first = self.reads % members.len();
            members[first..].iter().chain(&members[..first]).copied().collect::<Vec<_>>()
        };
        let mut plan = Vec::new();
        if self.classes.len() > 1 && self.since_last + 1 >= SHARE {
            let reserved = self.classes.last().into_iter().flat_map(rotated);
            plan.extend(reserved.map(|lane| (lane, 1)));
        }
        plan.extend(self.classes.iter().flat_map(rotated).map(|lane| (lane, max)));
        plan
    }

    /// Says that a job was taken from a lane.
    pub(super) fn took(&mut self, lane: usize) {
        let is_last = self.classes.last().is_some_and(|members| members.contains(&lane));
        self.since_last = if is_last { 0 } else { self.since_last + 1 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::PoolName;

    fn lane(pool: &str, class: i16) -> Lane {
        Lane { pool: PoolName::from(pool), class, graph: None }
    }

    /// Takes one job at a time from lanes that always have some; how often each was served.
    fn served(lanes: &[Lane], jobs: usize) -> Vec<usize> {
        let mut turns = Turns::new(lanes);
        let mut counts = vec![0; lanes.len()];
        for _ in 0..jobs {
            let (first, _) = turns.plan(1)[0];
            turns.took(first);
            counts[first] += 1;
        }
        counts
    }

    #[test]
    fn the_last_class_keeps_its_share_of_a_busy_worker() {
        let lanes = [lane("default", 0), lane("default", 1)];

        assert_eq!(served(&lanes, 80), [70, 10]);
    }

    #[test]
    fn lanes_of_one_class_take_turns() {
        let lanes = [lane("a", 0), lane("b", 0), lane("c", 0)];

        assert_eq!(served(&lanes, 90), [30, 30, 30]);
    }

    #[test]
    fn a_worker_of_one_class_reserves_nothing() {
        let mut turns = Turns::new(&[lane("a", 1)]);
        (0..20).for_each(|_| turns.took(0));

        assert_eq!(turns.plan(4), [(0, 4)]);
    }
}
