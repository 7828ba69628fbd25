//! What things are called in Redis, and what a job looks like there.

use uuid::Uuid;

use super::super::{Job, Lane};
use crate::domain::{PoolName, RunId, StepId};

/// The consumer group of every lane.
pub(super) const GROUP: &str = "workers";

/// The field that holds a job.
pub(super) const FIELD: &str = "job";

/// What stands in a lane's name before a code version.
pub(super) const BEFORE_VERSION: &str = ":";

/// Key names of one installation. They share one hash tag, so that one command reads many lanes
/// also where keys are spread over several servers.
#[derive(Debug, Clone)]
pub(super) struct Names {
    tag: String,
}

impl Names {
    pub(super) fn new(prefix: &str) -> Self {
        Self { tag: format!("{{{prefix}}}") }
    }

    /// The stream of a lane.
    pub(super) fn lane(&self, lane: &Lane) -> String {
        let Lane { pool, class, graph } = lane;
        match graph {
            Some(version) => format!("{}:queue:{pool}:{class}{BEFORE_VERSION}{version}", self.tag),
            None => format!("{}:queue:{pool}:{class}", self.tag),
        }
    }

    /// The set of code versions that have lanes in a pool and class.
    pub(super) fn versions(&self, pool: &PoolName, class: i16) -> String {
        format!("{}:versions:{pool}:{class}", self.tag)
    }

    /// Where a job that is in a lane is noted.
    pub(super) fn job(&self, job: &Job) -> String {
        format!("{}:job:{}:{}", self.tag, job.step, job.attempt)
    }

    /// Whoever has this key fills the lanes of a pool and class.
    pub(super) fn filling(&self, pool: &PoolName, class: i16) -> String {
        format!("{}:filling:{pool}:{class}", self.tag)
    }

    /// The stream of what nobody could work on.
    pub(super) fn dead(&self) -> String {
        format!("{}:dead", self.tag)
    }

    /// What is written to see whether Redis takes writes.
    pub(super) fn probe(&self) -> String {
        format!("{}:probe", self.tag)
    }
}

/// `run seq attempt trace`; the lane is the stream's name.
pub(super) fn encode(job: &Job) -> String {
    let trace = job.trace.as_deref().unwrap_or_default();
    format!("{} {} {} {trace}", job.step.run_id, job.step.seq, job.attempt)
}

/// The job in a lane's entry; `None` if it is none.
pub(super) fn decode(lane: &Lane, fields: &[Vec<u8>]) -> Option<Job> {
    let [name, text] = fields else { return None };
    let text = std::str::from_utf8(text).ok().filter(|_| name == FIELD.as_bytes())?;
    let mut parts = text.splitn(4, ' ');
    let run_id = RunId(Uuid::try_parse(parts.next()?).ok()?);
    let step = StepId { run_id, seq: parts.next()?.parse().ok()? };
    let attempt = parts.next()?.parse().ok()?;
    let trace = parts.next().filter(|trace| !trace.is_empty()).map(str::to_owned);
    Some(Job { step, lane: lane.clone(), attempt, trace })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::GraphVersion;

    fn lane() -> Lane {
        Lane { pool: PoolName::from("gpu"), class: 1, graph: Some(GraphVersion::from("c-12")) }
    }

    fn entry(field: &str, text: &str) -> Vec<Vec<u8>> {
        vec![field.as_bytes().to_vec(), text.as_bytes().to_vec()]
    }

    #[test]
    fn a_job_comes_back_as_it_was() {
        for trace in [None, Some("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".to_owned())] {
            let job = Job { step: StepId { run_id: RunId::new(), seq: 7 }, lane: lane(), attempt: 2, trace };

            assert_eq!(decode(&lane(), &entry(FIELD, &encode(&job))), Some(job));
        }
    }

    #[test]
    fn what_is_no_job_is_not_taken_for_one() {
        let run = RunId::new();
        let texts =
            [String::new(), "x 1 0 ".to_owned(), format!("{run} x 0 "), format!("{run} 1"), format!("{run} 1 99999 ")];

        for text in texts {
            assert_eq!(decode(&lane(), &entry(FIELD, &text)), None, "{text}");
        }
        assert_eq!(decode(&lane(), &entry("other", &format!("{run} 1 0 "))), None);
        assert_eq!(decode(&lane(), &[vec![0xff], vec![0xff]]), None);
        assert_eq!(decode(&lane(), &[]), None);
    }

    #[test]
    fn all_names_of_an_installation_share_a_hash_tag() {
        let names = Names::new("threadgate");
        let job = Job { step: StepId { run_id: RunId::new(), seq: 1 }, lane: lane(), attempt: 0, trace: None };

        assert_eq!(names.lane(&lane()), "{threadgate}:queue:gpu:1:c-12");
        let (filling, versions) = (names.filling(&lane().pool, 0), names.versions(&lane().pool, 0));
        for name in [names.lane(&lane()), names.job(&job), names.dead(), names.probe(), filling, versions] {
            assert!(name.starts_with("{threadgate}:"), "{name}");
        }
    }
}
