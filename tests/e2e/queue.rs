//! The queue over Redis: what every queue promises, and what Redis may do to it.

use std::sync::Arc;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use threadgate_shared::queue::contract::{Working, job, jobs, lane, until_unread};
use threadgate_shared::queue::{Job, JobQueue, Lane, RedisQueue, RedisQueueSettings};
use threadgate_tests::{Proxy, Redis, eventually};

async fn fresh() -> (Arc<dyn JobQueue>, Redis) {
    let redis = Redis::shared().await;
    (on(&redis), redis)
}

threadgate_shared::queue_contract!(fresh);

fn on(redis: &Redis) -> Arc<dyn JobQueue> {
    Arc::new(RedisQueue::open(&redis.url, &redis.prefix).expect("a URL"))
}

/// A queue that soon takes a silent worker for dead.
fn impatient(redis: &Redis) -> Arc<dyn JobQueue> {
    let settings = RedisQueueSettings {
        silence_max: Duration::from_millis(400),
        deliveries_max: 3,
        gone_after: Duration::from_secs(1),
    };
    Arc::new(RedisQueue::with_settings(&redis.url, &redis.prefix, settings).expect("a URL"))
}

fn key(redis: &Redis, lane: &Lane) -> String {
    format!("{{{}}}:queue:{}:{}", redis.prefix, lane.pool, lane.class)
}

/// Workers that Redis knows in a lane, with the jobs each holds.
async fn consumers(connection: &mut MultiplexedConnection, key: &str) -> Vec<(String, i64)> {
    let rows: Vec<std::collections::HashMap<String, redis::Value>> =
        redis::cmd("XINFO").arg("CONSUMERS").arg(key).arg("workers").query_async(connection).await.unwrap_or_default();
    let row = |row: &std::collections::HashMap<String, redis::Value>| {
        let name = redis::from_redis_value(row["name"].clone()).expect("a name");
        (name, redis::from_redis_value(row["pending"].clone()).expect("a number"))
    };
    rows.iter().map(row).collect()
}

/// Waits until as many workers wait for jobs in this server.
async fn until_waiting(connection: &mut MultiplexedConnection, count: usize) {
    eventually("workers to wait for jobs", async || {
        let list: String = redis::cmd("CLIENT").arg("LIST").query_async(connection).await.expect("an answer");
        let waiting = list.lines().filter(|line| line.contains("cmd=xreadgroup") && line.contains("flags=b")).count();
        if waiting == count { Ok(()) } else { Err(list) }
    })
    .await;
}

/// Sends a job until the worker has it, as the scheduler does.
async fn send_until_started(queue: &Arc<dyn JobQueue>, working: &mut Working, job: &Job) {
    eventually("a job that was sent again to start", async || {
        let _ = queue.push(std::slice::from_ref(job)).await;
        if working.has_started(job) { Ok(()) } else { Err("not yet") }
    })
    .await;
}

/// C22: whatever Redis forgets, workers go on with what is sent next.
#[tokio::test]
async fn workers_go_on_after_redis_was_flushed() {
    let redis = Redis::private().await;
    let queue = on(&redis);
    let mut working = Working::on(&queue, &[lane(0), lane(1)], 2);
    queue.push(&jobs(&lane(0), 1)).await.unwrap();
    working.started().await;
    queue.push(&jobs(&lane(1), 1)).await.unwrap();
    working.started().await;
    queue.push(&jobs(&lane(0), 5)).await.unwrap();

    redis.flush_all().await;
    assert_eq!(queue.unread(&[lane(0), lane(1)]).await.unwrap(), [0, 0]);
    working.let_go(1_000);

    for lane in [lane(0), lane(1)] {
        send_until_started(&queue, &mut working, &job(&lane)).await;
    }
    working.ended().await;
    until_unread(&queue, &[lane(0), lane(1)], &[0, 0]).await;
}

/// C22: Redis dies with everything and comes back empty.
#[tokio::test]
async fn workers_go_on_after_redis_came_back_empty() {
    let mut redis = Redis::private().await;
    let queue = on(&redis);
    let mut working = Working::quick(&queue, &[lane(0)], 2);
    queue.push(&[job(&lane(0))]).await.unwrap();
    working.started().await;

    redis.kill();
    eventually("the loss to be noticed", async || if queue.is_healthy() { Err(()) } else { Ok(()) }).await;
    let refused = queue.push(&[job(&lane(0))]).await.unwrap_err();
    redis.start_again().await;

    assert!(refused.to_string().starts_with("could not add jobs to the queue: "), "{refused}");
    send_until_started(&queue, &mut working, &job(&lane(0))).await;
    eventually("the queue to be healthy again", async || if queue.is_healthy() { Ok(()) } else { Err(()) }).await;
    working.ended().await;
}

/// C23: connections are reset three times.
#[tokio::test]
async fn workers_go_on_after_resets() {
    let redis = Redis::private().await;
    let proxy = Proxy::to(redis.port()).await;
    let url = format!("redis://127.0.0.1:{}", proxy.port);
    let queue: Arc<dyn JobQueue> = Arc::new(RedisQueue::open(&url, &redis.prefix).unwrap());
    let mut working = Working::quick(&queue, &[lane(0)], 2);

    for _ in 0..3 {
        send_until_started(&queue, &mut working, &job(&lane(0))).await;
        proxy.reset();
    }

    send_until_started(&queue, &mut working, &job(&lane(0))).await;
    working.ended().await;
}

/// C23: a connection stays open and nothing comes through it any more.
#[tokio::test]
async fn half_open_connections_are_noticed() {
    let redis = Redis::private().await;
    let proxy = Proxy::to(redis.port()).await;
    let url = format!("redis://127.0.0.1:{}", proxy.port);
    let queue: Arc<dyn JobQueue> = Arc::new(RedisQueue::open(&url, &redis.prefix).unwrap());
    let mut working = Working::quick(&queue, &[lane(0)], 2);
    send_until_started(&queue, &mut working, &job(&lane(0))).await;

    proxy.freeze();
    eventually("the silence to be noticed", async || if queue.is_healthy() { Err(()) } else { Ok(()) }).await;
    // Callers are refused, not held up one by one.
    let asked = std::time::Instant::now();
    let refused = futures::future::join_all((0..20).map(|_| queue.ping())).await;
    assert!(refused.iter().all(Result::is_err));
    assert!(asked.elapsed() < Duration::from_secs(6), "took {:?}", asked.elapsed());

    proxy.thaw();
    send_until_started(&queue, &mut working, &job(&lane(0))).await;
    eventually("the queue to be healthy again", async || if queue.is_healthy() { Ok(()) } else { Err(()) }).await;
    working.ended().await;
}

/// C23: the memory is full and nothing is evicted; also an idle worker notices, and falls back.
#[tokio::test]
async fn a_full_redis_is_unhealthy_until_it_has_room() {
    let redis = Redis::private().await;
    let mut connection = redis.connect().await;
    let (sender, receiver) = (on(&redis), on(&redis));
    let mut working = Working::quick(&receiver, &[lane(0)], 2);
    until_waiting(&mut connection, 1).await;
    let limit = async |connection: &mut MultiplexedConnection, bytes: &str| {
        redis::cmd("CONFIG").arg("SET").arg("maxmemory").arg(bytes).exec_async(connection).await.unwrap();
    };

    limit(&mut connection, "1").await;
    let refused = sender.push(&[job(&lane(0))]).await.unwrap_err();
    assert!(refused.to_string().contains("OOM"), "{refused}");
    assert!(!sender.is_healthy());
    eventually("the idle worker to notice", async || if receiver.is_healthy() { Err(()) } else { Ok(()) }).await;

    limit(&mut connection, "0").await;
    send_until_started(&sender, &mut working, &job(&lane(0))).await;
    assert!(sender.is_healthy());
    eventually("the idle worker to notice", async || if receiver.is_healthy() { Ok(()) } else { Err(()) }).await;
    working.ended().await;
}

#[tokio::test]
async fn what_is_no_job_goes_to_the_dead_stream_and_hinders_nobody() {
    let (queue, redis) = fresh().await;
    let mut connection = redis.connect().await;
    let broken = redis::cmd("XADD").arg(key(&redis, &lane(0))).arg("*").arg("job").arg("\u{0}what?").clone();
    let sound = job(&lane(0));
    broken.exec_async(&mut connection).await.unwrap();
    queue.push(std::slice::from_ref(&sound)).await.unwrap();

    let mut working = Working::quick(&queue, &[lane(0)], 1);

    assert_eq!(working.started().await, sound);
    // Also one that comes while the worker waits.
    broken.exec_async(&mut connection).await.unwrap();
    let dead = format!("{{{}}}:dead", redis.prefix);
    eventually("two entries in the dead stream", async || {
        let count: i64 = redis::cmd("XLEN").arg(&dead).query_async(&mut connection).await.unwrap();
        if count == 2 { Ok(()) } else { Err(count) }
    })
    .await;
    working.ended().await;
    let left: i64 = redis::cmd("XLEN").arg(key(&redis, &lane(0))).query_async(&mut connection).await.unwrap();
    assert_eq!(left, 0);
}

#[tokio::test]
async fn a_long_job_is_not_taken_from_its_worker() {
    let redis = Redis::shared().await;
    let queue = impatient(&redis);
    let mut connection = redis.connect().await;
    queue.push(&[job(&lane(0))]).await.unwrap();
    let mut busy = Working::on(&queue, &[lane(0)], 1);
    busy.started().await;
    let mut idle = Working::on(&queue, &[lane(0)], 1);

    // Its idle time falls back again and again: the worker renews its hold. Three silences long.
    let (mut last, mut renewals) = (0, 0);
    eventually("the worker to renew its hold", async || {
        let pending: Vec<(String, String, i64, i64)> = redis::cmd("XPENDING")
            .arg(key(&redis, &lane(0)))
            .arg(("workers", "-", "+", 1))
            .query_async(&mut connection)
            .await
            .unwrap();
        let (.., silence, deliveries) = pending[0];
        assert_eq!(deliveries, 1);
        renewals += usize::from(silence < last);
        last = silence;
        if renewals >= 9 { Ok(()) } else { Err(renewals) }
    })
    .await;

    assert!(idle.is_quiet());
    busy.let_go(1);
    busy.ended().await;
    idle.ended().await;
}

#[tokio::test]
async fn a_killed_workers_job_goes_to_another() {
    let redis = Redis::shared().await;
    let queue = impatient(&redis);
    let only = job(&lane(0));
    queue.push(std::slice::from_ref(&only)).await.unwrap();
    let mut doomed = Working::on(&queue, &[lane(0)], 1);
    doomed.started().await;
    let mut other = Working::quick(&queue, &[lane(0)], 1);

    doomed.kill();

    assert_eq!(other.started().await, only);
    other.ended().await;
    until_unread(&queue, &[lane(0)], &[0]).await;
}

#[tokio::test]
async fn a_job_that_kills_its_workers_goes_to_the_dead_stream() {
    let redis = Redis::shared().await;
    let queue = impatient(&redis);
    let mut connection = redis.connect().await;
    queue.push(&[job(&lane(0))]).await.unwrap();

    for _ in 0..3 {
        let mut doomed = Working::on(&queue, &[lane(0)], 1);
        doomed.started().await;
        doomed.kill();
    }
    let mut last = Working::on(&queue, &[lane(0)], 1);

    eventually("an empty lane", async || {
        let left: i64 = redis::cmd("XLEN").arg(key(&redis, &lane(0))).query_async(&mut connection).await.unwrap();
        if left == 0 { Ok(()) } else { Err(left) }
    })
    .await;
    let dead: i64 =
        redis::cmd("XLEN").arg(format!("{{{}}}:dead", redis.prefix)).query_async(&mut connection).await.unwrap();
    assert_eq!(dead, 1);
    assert!(last.is_quiet());
    last.ended().await;
}

#[tokio::test]
async fn jobs_without_a_slot_are_handed_back() {
    let redis = Redis::private().await;
    let queue = impatient(&redis);
    let lanes = [lane(0), lane(1), lane(2)];
    let mut connection = redis.connect().await;
    queue.push(&[job(&lane(0))]).await.unwrap();
    let mut doomed = Working::on(&queue, &lanes, 1);
    doomed.started().await;
    // Waits, with one slot for three lanes, and is then busy with another's job.
    let mut working = Working::on(&queue, &lanes, 1);
    until_waiting(&mut connection, 1).await;
    doomed.kill();
    working.started().await;

    let three: Vec<Job> = lanes.iter().map(job).collect();
    queue.push(&three).await.unwrap();
    working.let_go(1);

    working.started().await;
    eventually("the other two to be unread", async || {
        let unread: usize = queue.unread(&lanes).await.unwrap().iter().sum();
        if unread == 2 { Ok(()) } else { Err(unread) }
    })
    .await;
    working.let_go(3);
    working.started_many(2).await;
    working.ended().await;
    until_unread(&queue, &lanes, &[0, 0, 0]).await;
}

#[tokio::test]
async fn redis_forgets_workers_that_are_gone() {
    let redis = Redis::shared().await;
    let queue = impatient(&redis);
    let mut connection = redis.connect().await;
    let lane_key = key(&redis, &lane(0));
    let mut polite = Working::quick(&queue, &[lane(0)], 1);
    queue.push(&[job(&lane(0))]).await.unwrap();
    polite.started().await;
    polite.ended().await;
    assert_eq!(consumers(&mut connection, &lane_key).await, []);

    queue.push(&[job(&lane(0))]).await.unwrap();
    let mut killed = Working::on(&queue, &[lane(0)], 1);
    killed.started().await;
    let [(name, 1)] = &consumers(&mut connection, &lane_key).await[..] else { panic!("one worker with one job") };
    killed.kill();
    let mut staying = Working::quick(&queue, &[lane(0)], 1);
    staying.started().await;

    eventually("the killed worker to be forgotten", async || {
        let known = consumers(&mut connection, &lane_key).await;
        if known.iter().any(|(known, _)| known == name) { Err(known) } else { Ok(()) }
    })
    .await;
    staying.ended().await;
}

/// C29: what is finished leaves nothing behind, nor do workers that leave.
#[tokio::test]
async fn finished_jobs_leave_no_keys() {
    let redis = Redis::private().await;
    let queue = on(&redis);
    let coded = Lane { graph: Some("c-1".into()), ..lane(0) };
    let lanes = [lane(0), lane(1), coded.clone()];
    let mut working = Working::quick(&queue, &lanes, 8);
    for lane in &lanes {
        queue.push(&jobs(lane, 200)).await.unwrap();
    }

    working.started_many(600).await;
    working.ended().await;
    assert_eq!(queue.begin_filling(&coded.pool, 0, &[]).await.unwrap(), Some(vec![(lane(0), 0)]));
    queue.end_filling(&coded.pool, 0).await;

    let mut connection = redis.connect().await;
    let mut keys: Vec<String> = redis::cmd("KEYS").arg("*").query_async(&mut connection).await.unwrap();
    keys.retain(|key| !key.ends_with(":probe"));
    assert!(keys.is_empty(), "{keys:?}");
}

/// C29: an idle worker asks Redis at most once a second.
#[tokio::test]
async fn an_idle_worker_costs_a_command_a_second() {
    let redis = Redis::private().await;
    let queue = on(&redis);
    let mut connection = redis.connect().await;
    let working = Working::on(&queue, &[lane(0), lane(1), lane(2), lane(3)], 8);
    until_waiting(&mut connection, 1).await;
    let mut look = async || {
        let info: String = redis::cmd("INFO").arg("commandstats").query_async(&mut connection).await.unwrap();
        let calls = |line: &str| line.split("calls=").nth(1)?.split(',').next()?.parse::<u64>().ok();
        let of = |name: &str| {
            let name = format!("cmdstat_{name}:");
            info.lines().find(|line| line.starts_with(&name)).and_then(calls).unwrap_or(0)
        };
        // What is not a script's own part, nor ours.
        let all: u64 = info.lines().filter_map(calls).sum();
        (all - of("xautoclaim") - of("set") - of("info"), of("xreadgroup"))
    };
    let begin = std::time::Instant::now();
    let (before, reads) = look().await;

    let after = eventually("the worker to wait three times", async || match look().await {
        (all, now) if now >= reads + 3 => Ok(all),
        seen => Err(seen),
    })
    .await;

    let (asked, seconds) = (after - before, begin.elapsed().as_secs_f64());
    assert!(asked as f64 <= seconds, "{asked} commands in {seconds} s");
    working.ended().await;
}
