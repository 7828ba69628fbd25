//! Executes one graph node per job.
