//! Reads jobs for one worker on a connection of its own: what others abandoned, what waits, and
//! otherwise what comes next. It reads only as many jobs as there are free slots.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use redis::aio::MultiplexedConnection;
use redis::{ErrorKind, RedisResult, ScriptInvocation};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::super::runtime::Reader;
use super::super::turns::Turns;
use super::super::{Job, Lane};
use super::held::{Entry, Held, removal};
use super::names::{GROUP, decode};
use super::{NOTE_TTL_S, Settings, Shared, scripts};
use crate::link::{ANSWER_TIMEOUT, Ask, millis};

/// How long one read waits for the next job at most; looking for abandoned jobs mostly comes first.
const BLOCK: Duration = Duration::from_secs(5);

/// How long a drained worker waits for its read to come back.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);

/// The longest pause between two tries to connect.
const RECONNECT_MAX: Duration = Duration::from_secs(1);

/// Entries kept of what nobody could work on.
const DEAD_MAX: usize = 1_000;

/// Names and values in turn.
type Fields = Vec<Vec<u8>>;
/// Ids with what they hold.
type Entries = Vec<(String, Fields)>;
/// Lanes as keys with their entries; nothing after a wait in vain.
type Streams = Option<Vec<(String, Entries)>>;
/// Ids with what they hold and how often they were delivered.
type Reclaimed = Vec<(String, Fields, u64)>;
type Found = Vec<(Job, Arc<Entry>)>;

/// The reader of one worker.
pub(super) struct RedisReader {
    shared: Arc<Shared>,
    held: Arc<Held>,
    lanes: Vec<Lane>,
    settings: Settings,
    turns: Turns,
    connection: Option<Connection>,
    reconnect_pause: Duration,
    /// Nothing was unread when last seen, so that waiting is all there is to do.
    is_drained: bool,
    reclaim_at: Instant,
    /// The one lane that an idle worker looks at next.
    idle_lane: usize,
    tidy_at: Instant,
}

#[derive(Clone)]
struct Connection {
    redis: MultiplexedConnection,
    /// By which another connection can wake this one.
    id: i64,
}

#[async_trait]
impl Reader for RedisReader {
    type Receipt = Arc<Entry>;

    async fn read(&mut self, max: usize, shutdown: &CancellationToken) -> Found {
        match self.try_read(max, shutdown).await {
            Ok(found) => {
                self.shared.reading(true);
                self.reconnect_pause = Duration::from_millis(20);
                found
            }
            Err(error) => {
                if self.shared.reading(false) {
                    warn!("Lost the queue, will try again: {error}");
                }
                self.connection = None;
                self.is_drained = false;
                shutdown.run_until_cancelled(tokio::time::sleep(self.reconnect_pause)).await;
                self.reconnect_pause = (self.reconnect_pause * 2).min(RECONNECT_MAX);
                Vec::new()
            }
        }
    }
}

impl RedisReader {
    pub(super) fn new(shared: Arc<Shared>, held: Arc<Held>, lanes: Vec<Lane>, settings: Settings) -> Self {
        let now = Instant::now();
        Self {
            turns: Turns::new(&lanes),
            shared,
            held,
            lanes,
            settings,
            connection: None,
            reconnect_pause: Duration::ZERO,
            is_drained: false,
            reclaim_at: now,
            idle_lane: 0,
            tidy_at: now + settings.gone_after / 10,
        }
    }

    async fn try_read(&mut self, max: usize, shutdown: &CancellationToken) -> RedisResult<Found> {
        let mut connection = match &self.connection {
            Some(connection) => connection.clone(),
            None => self.connect().await?,
        };
        if Instant::now() >= self.reclaim_at {
            let found = self.reclaim(&mut connection, max).await?;
            if !found.is_empty() {
                return Ok(found);
            }
        }
        if !self.is_drained {
            let found = self.take(&mut connection, max).await?;
            if !found.is_empty() {
                return Ok(found);
            }
        }
        self.wait(connection, max, shutdown).await
    }

    async fn connect(&mut self) -> RedisResult<Connection> {
        let mut redis = self.shared.link.blocking().await?;
        let id = within(ANSWER_TIMEOUT, redis::cmd("CLIENT").arg("ID").query_async(&mut redis)).await?;
        self.warn_of_eviction(&mut redis).await?;
        if !self.shared.is_healthy() {
            info!("The queue is back");
        }
        Ok(self.connection.insert(Connection { redis, id }).clone())
    }

    /// Keys that Redis drops on its own only cost time; still somebody should know why.
    async fn warn_of_eviction(&self, redis: &mut MultiplexedConnection) -> RedisResult<()> {
        let memory: String = within(ANSWER_TIMEOUT, redis::cmd("INFO").arg("memory").query_async(redis)).await?;
        let policy = memory.lines().find_map(|line| line.strip_prefix("maxmemory_policy:")).unwrap_or("noeviction");
        if policy.trim() != "noeviction" {
            warn!("Redis may drop jobs when its memory is full (maxmemory-policy {}); set noeviction", policy.trim());
        }
        Ok(())
    }

    /// Takes what is unread, by class and in turn.
    async fn take(&mut self, connection: &mut Connection, max: usize) -> RedisResult<Found> {
        let plan = self.turns.plan(max);
        let mut script = scripts::TAKE.prepare_invoke();
        plan.iter().for_each(|(lane, _)| {
            script.key(&self.held.lanes[*lane]);
        });
        script.arg(GROUP).arg(&self.held.consumer).arg(max);
        plan.iter().for_each(|(_, limit)| {
            script.arg(*limit);
        });
        let answer: Vec<(usize, Entries)> = run(connection, &script).await?;
        let entries = answer.into_iter().flat_map(|(place, entries)| {
            let lane = plan[place - 1].0;
            entries.into_iter().map(move |(id, fields)| (lane, id, fields))
        });
        let entries: Vec<_> = entries.collect();
        self.is_drained = entries.is_empty();
        self.accept(entries).await
    }

    /// Waits for the next job; of one lane only, unless several come at the same moment.
    async fn wait(
        &mut self,
        mut connection: Connection,
        max: usize,
        shutdown: &CancellationToken,
    ) -> RedisResult<Found> {
        let wait = BLOCK.min(self.reclaim_at.saturating_duration_since(Instant::now())).max(Duration::from_millis(1));
        // Each lane may answer with this many.
        let each = (max / self.lanes.len().max(1)).max(1);
        let mut command = redis::cmd("XREADGROUP");
        command.arg("GROUP").arg(GROUP).arg(&self.held.consumer).arg("COUNT").arg(each);
        command.arg("BLOCK").arg(millis(wait)).arg("STREAMS").arg(&self.held.lanes).arg(vec![">"; self.lanes.len()]);
        let (id, mut waiting) = (connection.id, connection.redis.clone());
        let read = within(wait + ANSWER_TIMEOUT, command.query_async(&mut waiting));
        tokio::pin!(read);
        let answer: RedisResult<Streams> = tokio::select! {
            biased;
            answer = &mut read => answer,
            () = shutdown.cancelled() => {
                // What Redis gives this read away to at this moment would wait for a reclaimer.
                let _ = self.shared.link.ask::<i64>(Ask::Command(redis::cmd("CLIENT").arg("UNBLOCK").arg(id))).await;
                timeout(LEAVE_TIMEOUT, read).await.unwrap_or(Ok(None))
            }
        };
        match answer {
            Ok(Some(streams)) => self.accept_streams(streams, each, max).await,
            Ok(None) => {
                self.is_drained = true;
                Ok(Vec::new())
            }
            Err(error) if is_no_group(&error) => {
                self.create_groups(&mut connection).await?;
                Ok(Vec::new())
            }
            Err(error) => Err(error),
        }
    }

    async fn accept_streams(&mut self, streams: Vec<(String, Entries)>, each: usize, max: usize) -> RedisResult<Found> {
        // A lane that gave less than it might has no more.
        self.is_drained = streams.iter().all(|(_, entries)| entries.len() < each);
        let place = |key: &str| self.held.lanes.iter().position(|lane| lane == key);
        let entries: Vec<_> = streams
            .into_iter()
            .filter_map(|(key, entries)| Some((place(&key)?, entries)))
            .flat_map(|(lane, entries)| entries.into_iter().map(move |(id, fields)| (lane, id, fields)))
            .collect();
        let mut found = self.accept(entries).await?;
        for (job, entry) in found.split_off(found.len().min(max)) {
            self.hand_back(&job, &entry).await?;
        }
        Ok(found)
    }

    /// Several lanes had jobs at once, and there is no slot for this one.
    async fn hand_back(&self, job: &Job, entry: &Arc<Entry>) -> RedisResult<()> {
        let mut script = scripts::HAND_BACK.prepare_invoke();
        script.key(&self.held.lanes[entry.lane]).key(&entry.note);
        script.arg(GROUP).arg(&entry.id).arg(super::names::encode(job)).arg(NOTE_TTL_S);
        self.held.remove([entry]);
        self.shared.link.ask::<()>(Ask::Script(&script)).await
    }

    /// Takes over what others have let go of, and now and then forgets the others.
    async fn reclaim(&mut self, connection: &mut Connection, max: usize) -> RedisResult<Found> {
        let lanes = self.lanes_to_look_at();
        let mut script = scripts::RECLAIM.key(self.shared.names.probe());
        script
            .key(&self.held.lanes[lanes.clone()])
            .arg(GROUP)
            .arg(&self.held.consumer)
            .arg(max)
            .arg(millis(self.settings.silence_max));
        let (writes, found): (bool, Vec<(usize, Reclaimed)>) = run(connection, &script).await?;
        self.shared.writing(writes);
        let mut entries = Vec::new();
        for (place, rows) in found {
            let lane = lanes.start + place;
            for (id, fields, deliveries) in rows {
                if deliveries > self.settings.deliveries_max {
                    self.bury(lane, &id, &fields, "delivered too often").await?;
                } else {
                    entries.push((lane, id, fields));
                }
            }
        }
        self.schedule_reclaim(!entries.is_empty());
        self.tidy(connection).await?;
        if !entries.is_empty() {
            metrics::counter!("threadgate_queue_reclaimed_total").increment(entries.len() as u64);
        }
        self.accept(entries).await
    }

    /// All lanes while there is work; with none in sight one after the other.
    fn lanes_to_look_at(&mut self) -> Range<usize> {
        let count = self.held.lanes.len();
        if !self.is_drained || count == 0 {
            return 0..count;
        }
        self.idle_lane = (self.idle_lane + 1) % count;
        self.idle_lane..self.idle_lane + 1
    }

    /// Soon again while there is work; with none in sight so that a read and this, with every
    /// command inside it, cost less than a command a second. A job that a worker took along into
    /// its death is then sent again by the store, before anybody finds it here.
    fn schedule_reclaim(&mut self, found: bool) {
        let silence = self.settings.silence_max;
        let is_idle = self.is_drained && !found;
        self.reclaim_at = Instant::now() + if is_idle { silence * 5 / 2 } else { silence / 2 };
    }

    async fn tidy(&mut self, connection: &mut Connection) -> RedisResult<()> {
        if Instant::now() < self.tidy_at {
            return Ok(());
        }
        self.tidy_at = Instant::now() + self.settings.gone_after / 10;
        let mut script = scripts::FORGET.key(&self.held.lanes);
        script.arg(GROUP).arg("").arg(millis(self.settings.gone_after));
        run::<i64>(connection, &script).await.map(drop)
    }

    /// Makes jobs of entries; what is none goes to the dead stream.
    async fn accept(&mut self, entries: Vec<(usize, String, Fields)>) -> RedisResult<Found> {
        let mut found = Vec::with_capacity(entries.len());
        for (lane, id, fields) in entries {
            let Some(job) = decode(&self.lanes[lane], &fields) else {
                self.bury(lane, &id, &fields, "not a job").await?;
                continue;
            };
            let entry = Arc::new(Entry { lane, id, note: self.shared.names.job(&job) });
            // One that we hold already was reclaimed from ourselves: its handler is at it.
            if self.held.add(&entry) {
                self.turns.took(lane);
                found.push((job, entry));
            }
        }
        metrics::counter!("threadgate_queue_taken_total").increment(found.len() as u64);
        Ok(found)
    }

    async fn bury(&self, lane: usize, id: &str, fields: &Fields, reason: &str) -> RedisResult<()> {
        let key = &self.held.lanes[lane];
        warn!("Moved entry {id} of {key} to the dead stream: {reason}");
        metrics::counter!("threadgate_queue_dead_total").increment(1);
        let note = decode(&self.lanes[lane], fields).map(|job| self.shared.names.job(&job)).unwrap_or_default();
        let entry = Arc::new(Entry { lane, id: id.to_owned(), note });
        let mut pipeline = redis::pipe();
        pipeline.cmd("XADD").arg(self.shared.names.dead()).arg("MAXLEN").arg("~").arg(DEAD_MAX).arg("*");
        pipeline.arg("reason").arg(reason).arg("lane").arg(key).arg("entry").arg(id);
        pipeline.arg("fields").arg(fields.join(&b' ')).ignore();
        let removal = removal(&self.held, &[entry]);
        removal.cmd_iter().for_each(|command| {
            pipeline.add_command(command.clone()).ignore();
        });
        self.shared.link.ask(Ask::Pipeline(&pipeline)).await
    }

    async fn create_groups(&self, connection: &mut Connection) -> RedisResult<()> {
        let mut pipeline = redis::pipe();
        for key in &self.held.lanes {
            pipeline.cmd("XGROUP").arg("CREATE").arg(key).arg(GROUP).arg("0").arg("MKSTREAM");
        }
        pipeline.ignore_errors();
        let made = within(ANSWER_TIMEOUT, pipeline.query_async(&mut connection.redis));
        let made: Vec<RedisResult<()>> = made.await?;
        made.into_iter().filter(|made| !made.as_ref().is_err_and(|error| error.code() == Some("BUSYGROUP"))).collect()
    }
}

async fn run<T: redis::FromRedisValue>(connection: &mut Connection, script: &ScriptInvocation<'_>) -> RedisResult<T> {
    within(ANSWER_TIMEOUT, script.invoke_async(&mut connection.redis)).await
}

/// Half-open connections never answer; the connection itself has no limit.
async fn within<T>(limit: Duration, answer: impl Future<Output = RedisResult<T>>) -> RedisResult<T> {
    let late = |_| Err((ErrorKind::Io, "Redis did not answer in time").into());
    timeout(limit, answer).await.unwrap_or_else(late)
}

fn is_no_group(error: &redis::RedisError) -> bool {
    error.code() == Some("NOGROUP") || error.code() == Some("UNBLOCKED")
}
