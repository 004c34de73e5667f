//! `peerlane bench`: measures and checks all-reduce, with nccl-tests' flags and table.

mod args;
mod buffer;
mod burst;
#[cfg(feature = "cuda")]
mod gpu;
mod json;
mod machine;
pub mod orders;
mod output;
pub mod parent;
mod payload;
mod rank;
mod report;
mod rival;
mod rival_mpi;
mod rows;
mod serve;
mod table;

pub use args::Args;

use anyhow::{anyhow, bail, ensure, Result};
use args::Device;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use orders::{Answer, Call, Gpu, Order, Settings, Subject, Task, Timing};
use output::Output;
use parent::Ranks;
use peerlane::schedule::Islands;
use rival::Rival;
use rows::{median, Measured, Place, Row};
use std::io::{BufReader, Write};
use std::process::ExitCode;
use table::Printer;

/// Where rank 0 chooses: a batch is about this long, and a row's batches together about this long.
const BATCH_US: f64 = 5_000.0;
const BUDGET_US: f64 = 150_000.0;
const ITERS: (f64, f64) = (5.0, 1000.0);
const BATCHES: (f64, f64) = (5.0, 21.0);
/// Iterations of a graph where `-n` does not say, as in nccl-tests.
const GRAPH_ITERS: u32 = 20;

/// Runs the benchmark; an error is anything that makes its figures worthless.
pub fn run(args: &Args) -> Result<()> {
    args.validate()?;
    let rows = rows::rows(args)?;
    ensure!(
        rows.iter().any(|row| row.count > 0),
        "nothing to measure: every size is smaller than one element"
    );
    let json = args.json.as_deref().map(|path| Output::create("--json", path)).transpose()?;
    let page = args.report.as_deref().map(|path| Output::create("--report", path)).transpose()?;
    let command = command_line();
    let gpus = Gpus::look(args)?;
    let machine = match &gpus.names {
        Some(names) => format!("{}; {names}", machine::describe()),
        None => machine::describe(),
    };
    let settings = Settings {
        ranks: args.ranks,
        islands: args.islands.clone(),
        algo: args.algo,
        proto: args.proto,
        direction: args.direction,
        deadline: args.deadline,
        seed: args.seed,
        slab: None,
        compare_calls: None,
        run_dir: None,
        gpu: gpus.gpu.clone(),
    };
    let islands = match settings.config(0)?.islands {
        Some(islands) => islands,
        None => Islands::single(args.ranks)?,
    };
    let mut ranks =
        if args.in_process() { Ranks::threads(&settings)? } else { Ranks::processes(&settings)? };
    let rival = match args.rival {
        None => args.fused.then(|| Rival::unfused(args.width)),
        Some(args::Rival::Mpi) => Some(Rival::mpi(args.rival_driver.as_deref(), args.ranks)?),
        Some(args::Rival::Nccl) => Some(gpus.nccl(&mut ranks)?),
    };
    let title = rival.as_ref().map(Rival::title);

    let mut printer = Printer::new(rival.is_some());
    let show = Screen::new(rows.len() as u64);
    let kind = match (args.in_process(), args.device, args.ranks) {
        (true, Device::Cpu, 1) => "thread",
        (true, Device::Cpu, _) => "threads",
        (true, Device::Cuda, _) => "in one process",
        (false, _, 1) => "process",
        (false, ..) => "processes",
    };
    let version = env!("CARGO_PKG_VERSION");
    show.line(&format!("# peerlane {version} bench: all-reduce, {} device", args.device.name()))?;
    show.line(&format!("# machine: {machine}"))?;
    for line in &gpus.said {
        show.line(&format!("# {line}"))?;
    }
    let shape = format!("{} {kind}, islands: {islands}", args.ranks);
    show.line(&format!("# ranks: {shape}{}", pids(&ranks)))?;
    show.line(&format!("# command: {command}"))?;
    show.line("# time: mean of a call in a batch, averaged over the ranks; median of the batches")?;
    for line in args.method() {
        show.line(&format!("# {line}"))?;
    }
    show.line(&printer.header(title.as_deref()))?;

    let mut bench = Bench { args, ranks, rival, data: 0 };
    let mut results = Vec::with_capacity(rows.len());
    for row in &rows {
        let measured = bench.measure(row)?;
        show.line(&printer.row(&measured))?;
        show.bar.inc(1);
        results.push(measured);
    }
    show.bar.finish_and_clear();
    bench.ranks.leave()?;
    bench.rival.map_or(Ok(()), Rival::finish)?;
    show.line(&printer.footer())?;
    if let Some(output) = json {
        let report = json::Report {
            results: &results,
            wrong_total: printer.wrong(),
            command: &command,
            machine: &machine,
        };
        output.write(|out| report.write(out))?;
    }
    if let Some(output) = page {
        let html = report::page(&report::Run {
            results: &results,
            wrong: printer.wrong(),
            checked: args.check > 0,
            command: &command,
            machine: &machine,
            ranks: &shape,
            rival: title.as_deref(),
        })?;
        output.write(|out| out.write_all(html.as_bytes()))?;
    }
    ensure!(printer.wrong() == 0, "{} elements were wrong; see #wrong above", printer.wrong());
    Ok(())
}

/// One rank of a run of [`run`], as a process.
pub fn serve_rank() -> Result<ExitCode> {
    let served = serve::serve(BufReader::new(std::io::stdin()), std::io::stdout())?;
    Ok(if served { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

struct Bench<'a> {
    args: &'a Args,
    ranks: Ranks,
    rival: Option<Rival>,
    /// Data sets that the rival has used.
    data: u64,
}

/// What the ranks answered about one way to call.
struct Way {
    place: Place,
    foreign_us: Option<f64>,
    algo: String,
    proto: String,
    timing: Timing,
}

/// What a rival needs to know to be measured like ours.
pub struct Counts {
    checks: u32,
    seed: u64,
    data: u64,
    ranks: usize,
    /// What a call of ours took.
    time_us: f64,
}

impl Counts {
    /// NCCL's result may rightly differ from ours, so it is not checked.
    fn rival_rounds_otherwise(&self, call: &Call) -> bool {
        #[cfg(feature = "cuda")]
        return gpu::nccl::rounds_otherwise(call, self.ranks);
        #[cfg(not(feature = "cuda"))]
        return (call.count, self.ranks) == (0, 0);
    }
}

impl Bench<'_> {
    fn measure(&mut self, row: &Row) -> Result<Measured> {
        let out = self.place(&row.call(false))?;
        let inside = self.place(&row.call(true))?;
        let mut rival = None;
        if let Some(opponent) = &mut self.rival {
            let counts = Counts {
                checks: self.args.check,
                seed: self.args.seed,
                data: self.data,
                ranks: self.args.ranks,
                time_us: out.place.time_us + out.foreign_us.unwrap_or(0.0),
            };
            let call = row.call(false);
            rival = opponent.measure(&call, &out.timing, &counts, &mut self.ranks)?;
            self.data += u64::from(self.args.check) + 1;
        }
        let either = |a: String, b: String| if a == b { a } else { format!("{a}+{b}") };
        Ok(Measured {
            bytes: row.call(false).bytes(),
            count: row.count,
            dtype: row.dtype.name(),
            redop: row.op.name(),
            algo: either(out.algo, inside.algo),
            proto: either(out.proto, inside.proto),
            ratio: rival
                .as_ref()
                .filter(|r| r.time_us > 0.0)
                .map(|r| out.place.time_us / r.time_us),
            out_of_place: out.place,
            in_place: inside.place,
            foreign_us: out.foreign_us,
            rival,
        })
    }

    fn place(&mut self, call: &Call) -> Result<Way> {
        let mut wrong = 0;
        if self.args.check > 0 {
            let (iterations, graph) = (self.args.check, self.args.graph > 0);
            let order = match self.subject() {
                None => Order::Check { call: *call, iterations, graph },
                Some(fused) => Order::Other(fused, Task::Check { call: *call, iterations, graph }),
            };
            for answer in self.ranks.ask(&order)? {
                match answer {
                    Answer::Checked { wrong: n } => wrong += n,
                    other => bail!("a rank answered a check with {other:?}"),
                }
            }
        }
        let timing = self.timing(call)?;
        let timed = self.time(call, timing)?;
        wrong += timed.wrong;
        let wrong = (self.args.check > 0).then_some(wrong);
        let time_us = median(&timed.batch_us);
        let place = Place::new(call.bytes(), self.args.ranks, time_us, wrong);
        let foreign_us = self.args.between.then(|| median(&timed.foreign_us));
        Ok(Way { place, foreign_us, algo: timed.algo, proto: timed.proto, timing })
    }

    /// The counts of a row: the flags', or those that rank 0's trial suggests. Every rank then gets the same.
    fn timing(&mut self, call: &Call) -> Result<Timing> {
        let mut timing = Timing {
            warmup: self.args.warmup,
            iters: match (self.args.iters, self.args.graph) {
                (0, 1..) => GRAPH_ITERS,
                (iters, _) => iters,
            },
            batches: self.args.batches,
            aggregate: self.args.aggregate,
            verify: self.args.check > 0,
            graph: self.args.graph,
            between: self.args.between,
        };
        if timing.iters > 0 && timing.batches > 0 {
            return Ok(timing);
        }
        let mut iters = if timing.iters > 0 { timing.iters } else { 4 };
        let iteration_us = loop {
            let trial = Timing { iters, batches: 1, verify: false, ..timing };
            let rank0 = self.time(call, trial)?.rank0_us * f64::from(timing.aggregate);
            // A trial of a few fast calls measures the clock and a cold cache.
            if timing.iters > 0 || iters >= 64 || rank0 * f64::from(iters) > BATCH_US / 10.0 {
                break rank0.max(1e-3);
            }
            iters *= 4;
        };
        if timing.iters == 0 {
            timing.iters = (BATCH_US / iteration_us).clamp(ITERS.0, ITERS.1) as u32;
        }
        if timing.batches == 0 {
            let batch_us = iteration_us * f64::from(timing.iters) * f64::from(timing.graph.max(1));
            timing.batches = (BUDGET_US / batch_us).clamp(BATCHES.0, BATCHES.1) as u32;
        }
        Ok(timing)
    }

    fn time(&mut self, call: &Call, timing: Timing) -> Result<Timed> {
        let order = match self.subject() {
            None => Order::Time { call: *call, timing },
            Some(fused) => Order::Other(fused, Task::Time { call: *call, timing }),
        };
        timed(self.ranks.ask(&order)?, &timing)
    }

    /// What is measured in place of our all-reduce.
    fn subject(&self) -> Option<Subject> {
        self.args.fused.then_some(Subject::Norm { width: self.args.width, fused: true })
    }
}

/// What came of an order to time.
struct Timed {
    /// Batch by batch, averaged over the ranks.
    batch_us: Vec<f64>,
    foreign_us: Vec<f64>,
    /// Of rank 0's first batch, the foreign kernel included.
    rank0_us: f64,
    /// Over all ranks.
    wrong: u64,
    algo: String,
    proto: String,
}

/// The ranks' answers as one.
fn timed(answers: Vec<Answer>, timing: &Timing) -> Result<Timed> {
    let n = answers.len() as f64;
    let batches = timing.batches as usize;
    let mut all: Option<Timed> = None;
    for answer in answers {
        match answer {
            Answer::Timed { batch_us, foreign_us, wrong, algo, proto }
                if batch_us.len() == batches
                    && foreign_us.len() == if timing.between { batches } else { 0 } =>
            {
                let share = |us: Vec<f64>| us.into_iter().map(|us| us / n).collect::<Vec<_>>();
                let add = |sum: &mut Vec<f64>, us: Vec<f64>| {
                    sum.iter_mut().zip(us).for_each(|(sum, us)| *sum += us);
                };
                let first = |us: &[f64]| us.first().copied().unwrap_or(0.0);
                let rank0_us = first(&batch_us) + first(&foreign_us);
                let (batch_us, foreign_us) = (share(batch_us), share(foreign_us));
                match &mut all {
                    Some(all) => {
                        add(&mut all.batch_us, batch_us);
                        add(&mut all.foreign_us, foreign_us);
                        all.wrong += wrong;
                    }
                    None => {
                        all = Some(Timed { batch_us, foreign_us, rank0_us, wrong, algo, proto })
                    }
                }
            }
            other => bail!("a rank answered a timing with {other:?}"),
        }
    }
    all.ok_or_else(|| anyhow!("no rank answered"))
}

/// The GPUs of a run, if it has any, and what the head of the table says about them.
#[derive(Default)]
struct Gpus {
    gpu: Option<Gpu>,
    names: Option<String>,
    said: Vec<String>,
    #[cfg(feature = "cuda")]
    nccl_lib: std::path::PathBuf,
}

#[cfg(feature = "cuda")]
impl Gpus {
    /// Settles what must be settled before the driver starts, starts it, and gives every rank its GPU. Nothing on the CPU.
    fn look(args: &Args) -> Result<Self> {
        if args.device == Device::Cpu {
            return Ok(Gpus::default());
        }
        let env = peerlane::env::Env::read()?;
        let mut said = gpu::process::prepare(args, &env);
        let gpu = gpu::process::place(args)?;
        let names = Some(gpu::process::describe(&gpu, args.ranks)?);
        if gpu.ranks_per_gpu > 1 {
            said.insert(0, format!("ranks per GPU: {}", gpu.ranks_per_gpu));
        }
        let nccl_lib = gpu::nccl::find(args.nccl_lib.as_deref(), env.nccl_lib.as_deref());
        Ok(Gpus { gpu: Some(gpu), names, said, nccl_lib })
    }

    fn nccl(&self, ranks: &mut Ranks) -> Result<Rival> {
        let ranks_per_gpu = self.gpu.as_ref().map_or(1, |gpu| gpu.ranks_per_gpu);
        Rival::nccl(&self.nccl_lib, ranks_per_gpu, ranks)
    }
}

/// `Args::validate` has refused everything that is about GPUs.
#[cfg(not(feature = "cuda"))]
impl Gpus {
    fn look(_args: &Args) -> Result<Self> {
        Ok(Gpus::default())
    }

    fn nccl(&self, _ranks: &mut Ranks) -> Result<Rival> {
        bail!("--rival nccl: this tool was built without CUDA")
    }
}

/// Standard output, and on a terminal a progress bar below it on standard error.
struct Screen {
    bar: ProgressBar,
}

impl Screen {
    fn new(rows: u64) -> Self {
        // Drawn on terminals only; indicatif looks.
        let bar = ProgressBar::with_draw_target(Some(rows), ProgressDrawTarget::stderr());
        let style = "{wide_bar} {pos}/{len} rows, {eta} left";
        bar.set_style(ProgressStyle::with_template(style).unwrap_or(ProgressStyle::default_bar()));
        Screen { bar }
    }

    fn line(&self, text: &str) -> Result<()> {
        Ok(self.bar.suspend(|| writeln!(std::io::stdout(), "{text}"))?)
    }
}

fn pids(ranks: &Ranks) -> String {
    let pids: Vec<_> = ranks.pids().iter().map(u32::to_string).collect();
    if pids.is_empty() {
        String::new()
    } else {
        format!(", pids: {}", pids.join(" "))
    }
}

fn command_line() -> String {
    std::env::args().collect::<Vec<_>>().join(" ")
}
