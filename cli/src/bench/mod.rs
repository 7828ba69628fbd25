//! `threadgate bench`: durable steps per second over HTTP, beside what the same Postgres commits in
//! the same minute. Absolute figures mean little on shared machines; the ratios do.

mod cpu;
pub mod graph;
mod growth;
mod limit;
mod load;
mod stack;

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use serde_json::json;

use load::{Figures, Load};

/// Options of `threadgate bench`.
#[derive(Debug, Clone, clap::Args)]
pub struct BenchArgs {
    /// An address on the Postgres server to measure; two databases are made there and dropped again.
    /// The idle part creates the extension `pg_stat_statements` in the database of the address itself.
    #[arg(long, env = "THREADGATE_DATABASE_URL", hide_env_values = true)]
    pub database_url: String,
    /// The Redis server to measure, for this alone.
    #[arg(long, env = "THREADGATE_REDIS_URL", hide_env_values = true)]
    pub redis_url: String,
    /// Rounds, 0 for none; each measures the limit, A, B one step per commit, B with group commit, and the limit again.
    #[arg(long, default_value_t = 3)]
    pub rounds: u32,
    /// Runs of part B.
    #[arg(long, default_value_t = 640)]
    pub runs: usize,
    /// Runs at once in part B.
    #[arg(long, default_value_t = 64)]
    pub concurrency: usize,
    /// Runs of part A, one at a time.
    #[arg(long, default_value_t = 30)]
    pub alone: usize,
    /// Seconds of each pgbench reading.
    #[arg(long, default_value_t = 4)]
    pub limit_seconds: u32,
    /// Kills of a worker in the recovery part; 0 leaves it out.
    #[arg(long, default_value_t = 0)]
    pub kills: usize,
    /// Seconds of the idle part; 0 leaves it out.
    #[arg(long, default_value_t = 0)]
    pub idle_seconds: u64,
    /// Messages of the old thread in the growth part, beside one of ten; 0 leaves it out.
    #[arg(long, default_value_t = 0)]
    pub growth_messages: usize,
    /// Where the processes' logs go.
    #[arg(long)]
    pub log_dir: Option<PathBuf>,
}

/// Measures and prints one JSON line per round and a summary for people on standard error.
///
/// # Errors
/// If a part could not be measured, or a run did not end as it must.
pub async fn run(args: &BenchArgs) -> Result<()> {
    if args.runs == 0 || args.concurrency == 0 || args.alone == 0 {
        bail!("--runs, --concurrency and --alone must be at least 1");
    }
    let mut rounds = Vec::new();
    for round in 1..=args.rounds {
        let figures = one_round(args).await.with_context(|| format!("round {round}"))?;
        println!("{}", figures.to_json());
        eprintln!("round {round}: {figures}");
        rounds.push(figures);
    }
    if !rounds.is_empty() {
        summarize(&rounds);
    }
    if args.kills > 0 {
        let recovery = stack::recovery(args).await.context("the recovery part")?;
        println!(
            "{}",
            json!({"kills": args.kills, "resume_ms_p50": recovery.p50, "resume_ms_p99": recovery.p99, "repeated_steps": recovery.repeated})
        );
    }
    if args.growth_messages > 0 {
        println!("{}", growth::growth(args, args.growth_messages).await.context("the growth part")?);
    }
    if args.idle_seconds > 0 {
        let idle = stack::idle(args).await.context("the idle part")?;
        println!("{idle}");
    }
    Ok(())
}

/// Prints the median of every ratio.
fn summarize(rounds: &[Round]) {
    let median = |part: fn(&Round) -> f64| {
        let mut values: Vec<f64> = rounds.iter().map(part).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    eprintln!(
        "median of {}: A {:.0} % of pgbench at 1 client; B {:.0} % with group commit, {:.0} % with one step per commit, of pgbench at 32 clients; {:.2} ms CPU per step",
        rounds.len(),
        100.0 * median(|round| round.ratio_a),
        100.0 * median(|round| round.ratio_group),
        100.0 * median(|round| round.ratio_single),
        median(|round| round.cpu_ms),
    );
}

/// One round's figures.
struct Round {
    limit_1: f64,
    limit_32: f64,
    steady: bool,
    alone: Figures,
    single: Figures,
    group: Figures,
    ratio_a: f64,
    ratio_single: f64,
    ratio_group: f64,
    cpu_ms: f64,
}

impl Round {
    fn to_json(&self) -> serde_json::Value {
        json!({
            "limit_1": self.limit_1, "limit_32": self.limit_32, "steady": self.steady,
            "a_steps_per_s": self.alone.steps_per_s, "a_run_ms_p50": self.alone.run_ms_p50, "a_run_ms_p99": self.alone.run_ms_p99, "ratio_a": self.ratio_a,
            "b_single_steps_per_s": self.single.steps_per_s, "ratio_b_single": self.ratio_single,
            "b_group_steps_per_s": self.group.steps_per_s, "b_run_ms_p50": self.group.run_ms_p50, "b_run_ms_p99": self.group.run_ms_p99, "ratio_b_group": self.ratio_group,
            "cpu_ms_per_step": self.cpu_ms,
        })
    }
}

impl std::fmt::Display for Round {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "pgbench {:.0}/s (1), {:.0}/s (32){}; A {:.0} steps/s = {:.0} %, run p50 {:.1} ms p99 {:.1} ms; B {:.0} steps/s = {:.0} % (group), {:.0} = {:.0} % (single), run p50 {:.0} ms p99 {:.0} ms; {:.2} ms CPU/step",
            self.limit_1,
            self.limit_32,
            if self.steady { "" } else { " UNSTEADY" },
            self.alone.steps_per_s,
            100.0 * self.ratio_a,
            self.alone.run_ms_p50,
            self.alone.run_ms_p99,
            self.group.steps_per_s,
            100.0 * self.ratio_group,
            self.single.steps_per_s,
            100.0 * self.ratio_single,
            self.group.run_ms_p50,
            self.group.run_ms_p99,
            self.cpu_ms,
        )
    }
}

async fn one_round(args: &BenchArgs) -> Result<Round> {
    let limit = limit::Limit::prepare(&args.database_url).await?;
    let before = limit.read(args.limit_seconds).await?;
    let alone_load = Load { runs: args.alone, concurrency: 1, sleep_ms: 0 };
    let load = Load { runs: args.runs, concurrency: args.concurrency, sleep_ms: 0 };

    let stack = stack::Stack::start(args, "1ms", 1).await?;
    load::drive(&stack.base, Load { runs: args.concurrency, ..load }).await?;
    let alone = load::drive(&stack.base, alone_load).await?;
    let cpu_before = stack.cpu()?;
    let group = load::drive(&stack.base, load).await?;
    let cpu_ms = 1000.0 * (stack.cpu()? - cpu_before) / group.steps();
    stack.end().await?;

    let stack = stack::Stack::start(args, "0s", 1).await?;
    load::drive(&stack.base, Load { runs: args.concurrency, ..load }).await?;
    let single = load::drive(&stack.base, load).await?;
    stack.end().await?;

    let after = limit.read(args.limit_seconds).await?;
    limit.drop().await?;
    let (limit_1, limit_32) = (f64::midpoint(before.one, after.one), f64::midpoint(before.many, after.many));
    let moved = |a: f64, b: f64| a.max(b) / a.min(b) > 1.5;
    Ok(Round {
        limit_1,
        limit_32,
        steady: !moved(before.one, after.one) && !moved(before.many, after.many),
        ratio_a: alone.steps_per_s / limit_1,
        ratio_single: single.steps_per_s / limit_32,
        ratio_group: group.steps_per_s / limit_32,
        alone,
        single,
        group,
        cpu_ms,
    })
}
