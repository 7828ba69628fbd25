//! The event log over Redis: what every log promises, and what Redis may do to it.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use threadgate_shared::domain::RunId;
use threadgate_shared::events::contract::{
    as_followed, next, next_event, piece, run_of_two_steps, started, until_ended, whole,
};
use threadgate_shared::events::{EventId, EventLog, Followed, RedisEvents};
use threadgate_tests::{Redis, eventually};

async fn fresh() -> (Arc<dyn EventLog>, Redis) {
    let redis = Redis::shared().await;
    (on(&redis), redis)
}

threadgate_shared::events_contract!(fresh);

fn on(redis: &Redis) -> Arc<dyn EventLog> {
    Arc::new(RedisEvents::open(&redis.url, &redis.prefix).expect("a URL"))
}

/// C49, C50: written by one process, followed in another.
#[tokio::test]
async fn events_reach_followers_in_other_processes() {
    let (writer, redis) = fresh().await;
    let reader = on(&redis);
    let (run, events) = (RunId::new(), run_of_two_steps());
    writer.publish(run, events[..1].to_vec()).await;
    let mut followers: Vec<_> = (0..3).map(|_| reader.follow(run, EventId::ZERO)).collect();
    for follower in &mut followers {
        assert_eq!(next_event(follower).await, events[0]);
    }

    writer.publish(run, events[1..].to_vec()).await;

    for follower in followers {
        assert_eq!(whole(follower).await, as_followed(&events[1..]));
    }
}

/// One reader serves all: one connection waits, however many runs are followed.
#[tokio::test]
async fn a_process_follows_many_runs_on_one_connection() {
    let redis = Redis::private().await;
    let (writer, reader) = (on(&redis), on(&redis));
    let runs: Vec<RunId> = (0..50).map(|_| RunId::new()).collect();
    let mut followers: Vec<_> = runs.iter().map(|run| reader.follow(*run, EventId::ZERO)).collect();
    for (run, follower) in runs.iter().zip(&mut followers) {
        writer.publish(*run, vec![started(1, 1)]).await;
        assert_eq!(next_event(follower).await, started(1, 1));
    }

    let mut connection = redis.connect().await;
    let clients: String = redis::cmd("CLIENT").arg("LIST").query_async(&mut connection).await.unwrap();
    let waiting = clients.lines().filter(|line| line.contains("cmd=xread ")).count();
    assert_eq!(waiting, 1, "{clients}");

    for (run, follower) in runs.iter().zip(followers) {
        writer.publish(*run, run_of_two_steps()).await;
        assert_eq!(whole(follower).await, as_followed(&run_of_two_steps()[1..]));
    }
}

/// C49: a reader that goes away leaves nothing running.
#[tokio::test]
async fn nobody_asks_redis_when_nobody_follows() {
    let redis = Redis::private().await;
    let log = on(&redis);
    let mut connection = redis.connect().await;
    let mut follower = log.follow(RunId::new(), EventId::ZERO);
    let mut waiting = async || {
        let clients: String = redis::cmd("CLIENT").arg("LIST").query_async(&mut connection).await.unwrap();
        clients.lines().filter(|line| line.contains("cmd=xread ") && line.contains("flags=b")).count()
    };
    eventually("the reader to wait", async || {
        let _ = futures::poll!(follower.next());
        if waiting().await == 1 { Ok(()) } else { Err(()) }
    })
    .await;

    drop(follower);

    eventually("the reader to rest", async || if waiting().await == 0 { Ok(()) } else { Err(()) }).await;
}

/// C51: Redis is emptied while a client is away.
#[tokio::test]
async fn a_flushed_stream_is_told_as_a_gap() {
    let redis = Redis::private().await;
    let log = on(&redis);
    let (run, events) = (RunId::new(), run_of_two_steps());
    log.publish(run, events[..3].to_vec()).await;
    let mut follower = log.follow(run, EventId::ZERO);
    for event in &events[..3] {
        assert_eq!(next_event(&mut follower).await, *event);
    }

    redis.flush_all().await;

    // The one who stayed hears of it too, without any further event.
    assert_eq!(next(&mut follower).await, Some(Followed::Gap));
    let mut returned = log.follow(run, events[2].id);
    assert_eq!(next(&mut returned).await, Some(Followed::Gap));
    log.publish(run, events[3..].to_vec()).await;
    assert_eq!(whole(follower).await, as_followed(&events[3..]));
    assert_eq!(whole(returned).await, as_followed(&events[3..]));
}

#[tokio::test]
async fn followers_hear_of_an_outage_and_go_on_after_it() {
    let mut redis = Redis::private().await;
    let log = on(&redis);
    let (run, events) = (RunId::new(), run_of_two_steps());
    log.publish(run, events[..1].to_vec()).await;
    let mut follower = log.follow(run, EventId::ZERO);
    assert_eq!(next_event(&mut follower).await, events[0]);

    redis.kill();
    assert_eq!(next(&mut follower).await, Some(Followed::Gap));
    assert!(!log.is_healthy());
    // Again and again, so that whoever rebuilds from the store keeps moving.
    assert_eq!(next(&mut follower).await, Some(Followed::Gap));
    // One who comes during the outage is told at once.
    let mut late = log.follow(run, EventId::ZERO);
    assert_eq!(next(&mut late).await, Some(Followed::Gap));
    // Publishing does not wait for Redis.
    let begin = std::time::Instant::now();
    for minor in 1..5_000 {
        log.publish(run, vec![piece(1, minor)]).await;
    }
    assert!(begin.elapsed() < Duration::from_secs(2), "took {:?}", begin.elapsed());

    redis.start_again().await;
    eventually("the log to be healthy", async || {
        log.publish(RunId::new(), vec![started(1, 1)]).await;
        if log.is_healthy() { Ok(()) } else { Err(()) }
    })
    .await;
    log.publish(run, events[4..].to_vec()).await;

    for follower in [follower, late] {
        let mut rest = whole(follower).await;
        rest.retain(|followed| *followed != Followed::Gap);
        assert_eq!(rest, as_followed(&events[4..]));
    }
}

/// C29: every stream has an expiry, a short one after the run's end, and no more than its bytes.
#[tokio::test]
async fn streams_expire() {
    let redis = Redis::private().await;
    let log = on(&redis);
    let (running, ended) = (RunId::new(), RunId::new());
    log.publish(running, vec![started(1, 1)]).await;
    log.publish(ended, run_of_two_steps()).await;
    until_ended(&log, ended).await;

    let mut connection = redis.connect().await;
    let keys: Vec<String> = redis::cmd("KEYS").arg("*").query_async(&mut connection).await.unwrap();
    assert_eq!(keys.iter().filter(|key| key.contains(":events:")).count(), 2, "{keys:?}");
    for key in keys {
        let seconds: i64 = redis::cmd("TTL").arg(&key).query_async(&mut connection).await.unwrap();
        let limit = if key.ends_with(&ended.to_string()) { 30 } else { 60 * 60 };
        assert!((1..=limit).contains(&seconds), "{key}: {seconds}");
    }
}
