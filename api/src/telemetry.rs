//! The names of this role's metrics, and what they mean.

/// Requests answered, by method, route and status.
pub const REQUESTS: &str = "threadgate_http_requests_total";

/// Seconds from a request to the head of its answer, by route.
pub const REQUEST_DURATION: &str = "threadgate_http_request_duration_seconds";

/// Streams that are open, by kind.
pub const FOLLOWERS: &str = "threadgate_stream_followers";

/// 1 while the queue answers this process, as its readiness check found last.
pub const REDIS_UP: &str = "threadgate_redis_up";

/// Tells the exporter what the metrics mean; whoever starts the role calls it once.
pub fn describe() {
    metrics::describe_counter!(REQUESTS, "Requests answered, by method, route and status.");
    metrics::describe_histogram!(
        REQUEST_DURATION,
        metrics::Unit::Seconds,
        "Seconds from a request to the head of its answer, by route."
    );
    metrics::describe_gauge!(FOLLOWERS, "Streams that are open: lines of /v1/graph/stream, events of a run.");
    metrics::describe_gauge!(REDIS_UP, "1 while the queue answers, as the readiness check found last.");
}
