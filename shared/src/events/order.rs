//! Which event may stand right behind which: where another one does, something is missing.

use super::EventId;

impl EventId {
    /// The step's place in its run, from 1.
    #[must_use]
    pub fn seq(self) -> u64 {
        self.major / 256
    }

    /// Whether nothing is missing between `self` and `next`. Behind [`EventId::ZERO`] stands the
    /// start of the first step.
    ///
    /// Pieces lost before a step's end do not count, for the end carries the whole; nor do attempts
    /// that were never heard of.
    #[must_use]
    pub fn is_followed_by(self, next: Self) -> bool {
        if next.major == self.major {
            return next.minor == self.minor.saturating_add(1)
                || (next.minor >= Self::FINISHED && next.minor > self.minor);
        }
        let begins = next.minor == 0 || next.minor >= Self::FINISHED;
        match next.seq().checked_sub(self.seq()) {
            Some(0) => next.major > self.major && begins,
            Some(1) => (self == Self::ZERO || self.minor >= Self::FINISHED) && begins,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::EventId;

    fn id(seq: i32, attempt: i16, minor: u64) -> EventId {
        EventId::of_step(seq, attempt, minor)
    }

    #[test]
    fn nothing_is_missing_along_a_run_with_a_repeated_step() {
        let run = [
            EventId::ZERO,
            id(1, 1, 0),
            id(1, 1, 1),
            id(1, 1, 2),
            id(1, 2, 0),
            id(1, 2, 1),
            id(1, 2, EventId::FINISHED),
            id(2, 1, 0),
            id(2, 1, EventId::FINISHED),
            id(2, 1, EventId::ENDED),
        ];

        assert!(run.windows(2).all(|pair| pair[0].is_followed_by(pair[1])));
    }

    #[test]
    fn a_lost_event_is_noticed() {
        let pairs = [
            (EventId::ZERO, id(1, 1, 1)),
            (EventId::ZERO, id(2, 1, 0)),
            (id(1, 1, 0), id(1, 1, 2)),
            (id(1, 1, 3), id(2, 1, 0)),
            (id(1, 1, EventId::FINISHED), id(2, 1, 1)),
            (id(1, 1, EventId::FINISHED), id(3, 1, 0)),
            (id(2, 1, 0), id(1, 1, 0)),
        ];

        for (before, next) in pairs {
            assert!(!before.is_followed_by(next), "{before} then {next}");
        }
    }

    #[test]
    fn pieces_lost_before_the_whole_do_not_count() {
        assert!(id(1, 1, 3).is_followed_by(id(1, 1, EventId::FINISHED)));
        assert!(id(1, 1, 3).is_followed_by(id(1, 1, EventId::ENDED)));
    }
}
