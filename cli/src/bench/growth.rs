//! What Postgres writes for a step of a thread with few and with many messages.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::graph::NODES;
use super::stack::Stack;
use super::{BenchArgs, limit, load};

/// Messages of the young thread.
const FEW: usize = 10;

/// Runs whose writes are counted; the median counts, for a vacuum may fall into one of them.
const RUNS: usize = 15;

/// Bytes of the write-ahead log per step, for a thread of ten messages and one of `many`.
pub(super) async fn growth(args: &BenchArgs, many: usize) -> Result<Value> {
    let stack = Stack::start(args, "1ms", 1).await?;
    let young = bytes_per_step(&stack, FEW).await?;
    let old = bytes_per_step(&stack, many).await?;
    stack.end().await?;
    Ok(json!({"messages": [FEW, many], "wal_bytes_per_step": [young, old], "ratio": old / young}))
}

async fn bytes_per_step(stack: &Stack, messages: usize) -> Result<f64> {
    let http = load::client()?;
    let thread = uuid::Uuid::new_v4().to_string();
    let mut written = Vec::new();
    for number in 0..=RUNS {
        let before = wal(stack).await?;
        let run = load::submit_on(&http, &stack.base, &thread, 0).await?;
        load::wait(&http, &stack.base, &run).await?;
        if number == 0 {
            fill(stack, &thread, messages).await?; // The first run made the thread.
        } else {
            written.push(wal(stack).await? - before);
        }
    }
    written.sort_by(f64::total_cmp);
    #[expect(clippy::cast_precision_loss, reason = "the graph is small")]
    let nodes = NODES as f64;
    Ok(load::percentile(&written, 50) / nodes)
}

/// Gives the thread a history of messages, and every page its first image after it.
async fn fill(stack: &Stack, thread: &str, messages: usize) -> Result<()> {
    let sql = format!(
        "insert into message (thread_key, position, message_id, role, body, added_in)
         select t.key, t.next_position + g, 'filled-' || g, 'user',
                json_build_object('message_id', 'filled-' || g, 'role', 'user', 'content', json_build_array(
                  json_build_object('type', 'text', 'text', repeat('m', 200)))), t.version
           from thread t, generate_series(1, {messages}) g where t.id = '{thread}';
         update checkpoint c set next_position = c.next_position + {messages} + 1
           from thread t where t.id = '{thread}' and c.thread_key = t.key and c.version = t.version;
         update thread set next_position = next_position + {messages} + 1 where id = '{thread}';
         vacuum analyze message"
    );
    for statement in sql.split(';') {
        limit::ask(&stack.database, statement).await?;
    }
    Ok(())
}

async fn wal(stack: &Stack) -> Result<f64> {
    let place = "select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')";
    limit::ask(&stack.database, place).await?.parse().context("the place in the write-ahead log")
}
