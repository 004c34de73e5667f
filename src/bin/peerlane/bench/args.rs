//! The flags of `peerlane bench`: those of nccl-tests, and where and how the ranks run.

use anyhow::{bail, ensure, Result};
use clap::ValueEnum;
use peerlane::env::parse_bytes;
use peerlane::schedule::Islands;
use peerlane::types::MAX_RANKS;
use peerlane::{Algorithm, DType, Direction, Lane, Op, Protocol};
use std::path::PathBuf;

/// Where the ranks' kernels run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Device {
    /// The CPU device: a thread per rank, slabs in shared memory
    Cpu,
    /// NVIDIA GPUs, with one or several ranks on each
    Cuda,
}

impl Device {
    /// As the flag spells it.
    pub fn name(self) -> &'static str {
        match self {
            Device::Cpu => "cpu",
            Device::Cuda => "cuda",
        }
    }
}

/// What is measured in the same run to compare with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Rival {
    /// Open MPI's MPI_Allreduce, beside ranks on the CPU
    Mpi,
    /// NCCL, beside ranks on GPUs
    Nccl,
}

/// Values of a flag that takes `all`, one name, or several separated by commas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct List<T>(pub Vec<T>);

fn list<T>(text: &str, all: &[T]) -> Result<List<T>, String>
where
    T: Copy + PartialEq + std::str::FromStr<Err = peerlane::Error>,
{
    if text == "all" {
        return Ok(List(all.to_vec()));
    }
    let mut values = Vec::new();
    for name in text.split(',') {
        let value = name.trim().parse::<T>().map_err(|e| format!("{e}, or all"))?;
        if !values.contains(&value) {
            values.push(value);
        }
    }
    Ok(List(values))
}

fn dtypes(text: &str) -> Result<List<DType>, String> {
    list(text, DType::ALL)
}

fn ops(text: &str) -> Result<List<Op>, String> {
    list(text, Op::ALL)
}

fn named<T: std::str::FromStr<Err = peerlane::Error>>(text: &str) -> Result<T, String> {
    text.parse().map_err(|e: peerlane::Error| e.to_string())
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(s) if s > 0.0 && s <= 1e6 => Ok(s),
        _ => Err("is not a number of seconds above 0 and up to 1000000".into()),
    }
}

/// Flags of `peerlane bench`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "\
Sizes are bytes of one rank's input, with an optional K, M or G (powers of 1024). A time is the mean
time of a call in a batch of calls, averaged over the ranks; the table shows the median over the batches.
algbw = size / time, busbw = algbw * 2 (n - 1) / n. #wrong counts elements, over all ranks and checks.
On GPUs a batch is timed from before its first launch until all ranks' streams have finished.
Exit status: 0 when something was measured and nothing was wrong, 1 otherwise, 2 for a wrong flag.")]
pub struct Args {
    /// Smallest size [default: 1K, or the largest size if that is below]
    #[arg(short = 'b', long = "minbytes", value_name = "SIZE", value_parser = parse_bytes)]
    pub min_bytes: Option<u64>,
    /// Largest size [default: 4M, or the smallest size if that is above]
    #[arg(short = 'e', long = "maxbytes", value_name = "SIZE", value_parser = parse_bytes)]
    pub max_bytes: Option<u64>,
    /// Each size is the last one times this [default: 4]
    #[arg(short = 'f', long = "stepfactor", value_name = "FACTOR", conflicts_with = "step_bytes")]
    pub step_factor: Option<u64>,
    /// Each size is the last one plus this, instead of -f
    #[arg(short = 'i', long = "stepbytes", value_name = "SIZE", value_parser = parse_bytes)]
    pub step_bytes: Option<u64>,
    /// These sizes, separated by commas, instead of -b, -e, -f and -i
    #[arg(
        long = "sizes",
        value_name = "SIZES",
        value_delimiter = ',',
        value_parser = parse_bytes,
        conflicts_with_all = ["min_bytes", "max_bytes", "step_factor", "step_bytes"]
    )]
    pub size_list: Option<Vec<u64>>,
    /// Data types: all, or some of int8,uint8,int32,uint32,int64,uint64,half,float,double,bfloat16
    #[arg(short = 'd', long = "datatype", value_name = "TYPES", default_value = "float", value_parser = dtypes)]
    pub dtypes: List<DType>,
    /// Operations: all, or some of sum,prod,max,min,avg
    #[arg(short = 'o', long = "op", value_name = "OPS", default_value = "sum", value_parser = ops)]
    pub ops: List<Op>,
    /// Iterations of a timed batch; 0 lets rank 0 choose from a short trial
    #[arg(short = 'n', long = "iters", value_name = "N", default_value_t = 0)]
    pub iters: u32,
    /// Calls before the timing starts
    #[arg(
        short = 'w',
        long = "warmup_iters",
        alias = "warmup-iters",
        value_name = "N",
        default_value_t = 5
    )]
    pub warmup: u32,
    /// Check iterations: calls with fresh data whose every element is compared; 0 checks nothing
    #[arg(short = 'c', long = "check", value_name = "N", default_value_t = 1)]
    pub check: u32,
    /// Calls of an iteration, made as one group
    #[arg(
        short = 'm',
        long = "agg_iters",
        alias = "agg-iters",
        value_name = "N",
        default_value_t = 1
    )]
    pub aggregate: u32,
    /// Timed batches of a row; 0 lets rank 0 choose, 5 to 21
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub batches: u32,
    /// Where the ranks' kernels run
    #[arg(long, value_enum, default_value_t = Device::Cpu)]
    pub device: Device,
    /// Number of ranks
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub ranks: usize,
    /// Ranks live in this process: on the CPU a thread each, on GPUs driven by one thread (the default there)
    #[arg(long, conflicts_with = "processes")]
    pub threads: bool,
    /// Ranks are processes (the default on the CPU)
    #[arg(long)]
    pub processes: bool,
    /// Ranks on each GPU: rank r is on GPU r / K [default: as few as the GPUs allow]
    #[arg(long, value_name = "K")]
    pub ranks_per_gpu: Option<usize>,
    /// On GPUs: capture -n iterations (default 20) in a graph per rank and launch it N times per batch; 0 is eager calls
    #[arg(short = 'G', long = "cudagraph", value_name = "N", default_value_t = 0)]
    pub graph: u32,
    /// On GPUs: put a small kernel of somebody else's before every call, which reads the last result and writes the next
    /// input, and subtract what these kernels take alone
    #[arg(long)]
    pub between: bool,
    /// On GPUs: how they reach each other's slabs [default: PEERLANE_LANE, else auto]
    #[arg(long, value_name = "NAME", value_parser = named::<Lane>)]
    pub lane: Option<Lane>,
    /// On GPUs: at most N blocks per launch, in place of the rule that ranks which share a GPU fill at most half of it with captured
    /// calls (-G) and a quarter with eager ones
    #[arg(long, value_name = "N")]
    pub blocks: Option<u32>,
    /// On GPUs: threads of a block, a multiple of 32 up to 512; kernels that take fewer get fewer
    #[arg(long, value_name = "N")]
    pub block_threads: Option<u32>,
    /// On GPUs: measure all-reduce, residual add and RMSNorm in one kernel; the rival is our all-reduce and a kernel of the
    /// rest after it. Types half and bfloat16
    #[arg(long, conflicts_with = "rival")]
    pub fused: bool,
    /// Elements of a row of --fused; sizes are whole rows
    #[arg(long, value_name = "N", default_value_t = 7168, requires = "fused")]
    pub width: usize,
    /// A fatbin of cuda/foreign.cu in place of the one that is built in
    #[arg(long, value_name = "FILE", requires = "between")]
    pub foreign_kernel: Option<PathBuf>,
    /// Serve every call with this algorithm
    #[arg(long, value_name = "NAME", value_parser = named::<Algorithm>)]
    pub algo: Option<Algorithm>,
    /// Serve every call with this protocol
    #[arg(long, value_name = "NAME", value_parser = named::<Protocol>)]
    pub proto: Option<Protocol>,
    /// Who moves the data of the flagged protocol: push or pull
    #[arg(long, value_name = "NAME", value_parser = named::<Direction>)]
    pub direction: Option<Direction>,
    /// Islands of ranks, such as 0-3,4-7 or 0+2,1+3 [default: PEERLANE_ISLANDS, else one island]
    #[arg(long, value_name = "ISLANDS")]
    pub islands: Option<String>,
    /// Measure this beside every row, out of place, and check it too
    #[arg(long, value_enum)]
    pub rival: Option<Rival>,
    /// Open MPI's driver [default: the one that `make` or `make install` put beside this tool]
    #[arg(long, value_name = "FILE", requires = "rival")]
    pub rival_driver: Option<PathBuf>,
    /// NCCL's library [default: PEERLANE_NCCL_LIB, else libnccl.so.2 of the loader's path]
    #[arg(long, value_name = "FILE", requires = "rival")]
    pub nccl_lib: Option<PathBuf>,
    /// Write the results here as JSON, besides the table
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write a web page here, besides the table: latency over size as charts, and how it was measured; one file, no network
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Seconds until a wait inside a call gives up; a rank silent for that long and 30 s more ends the run
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, value_parser = seconds)]
    pub deadline: f64,
    /// Seed of the data; a run with the same seed reduces the same numbers
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
}

impl Args {
    /// What no single flag's parser can see; all of it before a process is started.
    pub fn validate(&self) -> Result<()> {
        ensure!(
            (1..=MAX_RANKS).contains(&self.ranks),
            "--ranks {}: a communicator has 1 to {MAX_RANKS} ranks",
            self.ranks
        );
        ensure!(self.aggregate >= 1, "-m 0: an iteration has at least one call");
        ensure!(
            u64::from(self.iters) * u64::from(self.aggregate) <= 100_000_000,
            "-n {} -m {}: more than 100000000 calls in a batch",
            self.iters,
            self.aggregate
        );
        if let Some(text) = &self.islands {
            Islands::parse(self.ranks, text)?;
        }
        match self.device {
            Device::Cpu => self.validate_cpu()?,
            Device::Cuda => self.validate_cuda()?,
        }
        self.sizes().map(drop)
    }

    fn validate_cpu(&self) -> Result<()> {
        let named = [
            ("--ranks-per-gpu", self.ranks_per_gpu.is_some()),
            ("-G", self.graph > 0),
            ("--between", self.between),
            ("--fused", self.fused),
            ("--lane", self.lane.is_some()),
            ("--blocks", self.blocks.is_some()),
            ("--block-threads", self.block_threads.is_some()),
            ("--rival nccl", self.rival == Some(Rival::Nccl)),
            ("--nccl-lib", self.nccl_lib.is_some()),
        ];
        match named.iter().find(|(_, given)| *given) {
            Some((flag, _)) => bail!("{flag} is about GPUs; it needs --device cuda"),
            None => Ok(()),
        }
    }

    fn validate_cuda(&self) -> Result<()> {
        ensure!(
            cfg!(feature = "cuda"),
            "--device cuda: this tool was built without CUDA; `make` builds with it where it finds nvcc, else: cargo build \
             --release --features cli,cuda"
        );
        ensure!(
            self.rival != Some(Rival::Mpi) && self.rival_driver.is_none(),
            "--rival mpi reduces in host memory; beside GPUs use --rival nccl"
        );
        if self.fused {
            self.validate_fused()?;
        }
        ensure!(
            self.ranks_per_gpu != Some(0),
            "--ranks-per-gpu 0: a GPU that carries ranks carries at least one"
        );
        ensure!(
            self.aggregate == 1 || !self.between,
            "-m {} --between: a group's calls follow each other, with nothing between them",
            self.aggregate
        );
        ensure!(
            self.graph == 0 || u64::from(self.iters) * u64::from(self.aggregate) <= 20_000,
            "-G {} -n {} -m {}: more than 20000 calls in a graph; make -n smaller and -G larger",
            self.graph,
            self.iters,
            self.aggregate
        );
        Ok(())
    }

    /// Types, operations and sizes that the fused operation has.
    fn validate_fused(&self) -> Result<()> {
        let halves = [DType::F16, DType::BF16];
        if let Some(other) = self.dtypes.0.iter().find(|dtype| !halves.contains(dtype)) {
            bail!("--fused has no {other}; use -d half, -d bfloat16 or -d half,bfloat16");
        }
        if let Some(other) = self.ops.0.iter().find(|op| **op != Op::Sum) {
            bail!("--fused has no {other}; it adds: -o sum");
        }
        ensure!(self.aggregate == 1, "-m {} --fused: one call at a time", self.aggregate);
        ensure!(
            self.width > 0 && self.width.is_multiple_of(8) && self.width <= 1 << 24,
            "--width {}: a row has a multiple of 8 elements, up to 16777216",
            self.width
        );
        let row = 2 * self.width as u64;
        if let Some(size) = self.sizes()?.into_iter().find(|size| !size.is_multiple_of(row)) {
            bail!(
                "--fused: {size} bytes are no whole rows of {} elements, {row} bytes; use -b {row} -f 2, or --width",
                self.width
            );
        }
        Ok(())
    }

    /// Whether the ranks live in this process.
    pub fn in_process(&self) -> bool {
        self.threads || (self.device == Device::Cuda && !self.processes)
    }

    /// How calls are made and timed, where that is not the plain way; lines for the head of the table.
    pub fn method(&self) -> Vec<String> {
        let mut lines = Vec::new();
        if self.graph > 0 {
            lines.push(format!(
                "graph: the calls are captured in one graph per rank, launched {} time{} per batch",
                self.graph,
                if self.graph == 1 { "" } else { "s" }
            ));
        }
        if self.between {
            lines.push(
                "between: a kernel of somebody else's before every call; what these take alone is subtracted".into(),
            );
        }
        if self.fused {
            lines.push(format!(
                "fused: all-reduce, residual add and RMSNorm in one kernel, rows of {}; beside it all-reduce and a kernel after it",
                self.width
            ));
        }
        if let Some(blocks) = self.blocks {
            lines.push(format!(
                "blocks: up to {blocks} per launch; the rule that ranks fill at most half of their GPU with captured calls, a quarter with eager ones, is lifted"
            ));
        }
        lines
    }

    /// The sizes in bytes, ascending unless they are named one by one.
    pub fn sizes(&self) -> Result<Vec<u64>> {
        if let Some(sizes) = &self.size_list {
            return Ok(sizes.clone());
        }
        const SMALLEST: u64 = 1 << 10;
        const LARGEST: u64 = 4 << 20;
        let (min, max) = match (self.min_bytes, self.max_bytes) {
            (None, None) => (SMALLEST, LARGEST),
            (None, Some(max)) => (SMALLEST.min(max), max),
            (Some(min), None) => (min, LARGEST.max(min)),
            (Some(min), Some(max)) => (min, max),
        };
        ensure!(min <= max, "-b {min} -e {max}: no size is at least {min} and at most {max}");
        let next = |size: u64| match self.step_bytes {
            Some(step) => size.checked_add(step),
            None => size.checked_mul(self.step_factor.unwrap_or(4)),
        };
        let mut sizes = vec![min];
        let mut last = min;
        while last < max {
            let Some(size) = next(last) else { break };
            if size <= last {
                bail!(
                    "{} never reaches -e {max} from {last}; use -f 2 or more with -b above 0, or -i 1 or more",
                    match self.step_bytes {
                        Some(step) => format!("-i {step}"),
                        None => format!("-f {}", self.step_factor.unwrap_or(4)),
                    }
                );
            }
            if size > max {
                break;
            }
            ensure!(
                sizes.len() < 100_000,
                "more than 100000 sizes from {min} to {max}; step wider"
            );
            sizes.push(size);
            last = size;
        }
        Ok(sizes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Tool {
        #[command(flatten)]
        args: Args,
    }

    fn parse(line: &str) -> Args {
        Tool::try_parse_from(std::iter::once("bench").chain(line.split_whitespace())).unwrap().args
    }

    fn refusal(line: &str) -> String {
        match Tool::try_parse_from(std::iter::once("bench").chain(line.split_whitespace())) {
            Err(error) => error.to_string(),
            Ok(tool) => tool.args.validate().unwrap_err().to_string(),
        }
    }

    #[test]
    fn sizes_step_as_in_nccl_tests() {
        let sizes = |line| parse(line).sizes().unwrap();
        assert_eq!(sizes("-b 1K -e 4M -f 4").len(), 7);
        assert_eq!(sizes("-b 14336 -e 114688 -f 2"), [14336, 28672, 57344, 114688]);
        assert_eq!(sizes("-b 8 -e 20 -i 8"), [8, 16]);
        assert_eq!(sizes("-b 8K -e 8K"), [8192]);
        assert_eq!(sizes("-e 512"), [512]);
        assert_eq!(sizes("--sizes 1K,14336,512"), [1024, 14336, 512]);
        assert_eq!(sizes("-b 8M"), [8 << 20]);
        assert_eq!(sizes("-b 0 -e 8 -i 4"), [0, 4, 8]);
        assert_eq!(sizes(""), [1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20]);
    }

    #[test]
    fn lists_take_all_one_or_several_names() {
        assert_eq!(parse("-d all").dtypes.0, DType::ALL);
        assert_eq!(parse("-d float,half,float").dtypes.0, [DType::F32, DType::F16]);
        assert_eq!(parse("-o all").ops.0, Op::ALL);
        assert_eq!(parse("").ops.0, [Op::Sum]);
    }

    #[test]
    #[cfg(feature = "cuda")]
    fn wrong_flags_about_gpus_are_refused_with_the_reason() {
        for (line, what) in [
            ("--rival mpi", "--rival nccl"),
            ("--ranks-per-gpu 0", "at least one"),
            ("-m 2 --between", "nothing between"),
            ("-G 1 -n 20001", "-G larger"),
            ("--fused -d float", "no float"),
            ("--fused -d half -o max", "no max"),
            ("--fused -d half -b 14336 -e 14336 --width 7164", "multiple of 8"),
            ("--fused -d half -b 1K -e 64K", "no whole rows"),
            ("--fused -d half -b 14336 -e 14336 -m 2", "one call at a time"),
            ("--fused -d half --rival nccl", "cannot be used with"),
            ("--width 8", "--fused"),
        ] {
            let error = refusal(&format!("--device cuda {line}"));
            assert!(error.contains(what), "{line}: {error}");
        }
    }

    #[test]
    #[cfg(not(feature = "cuda"))]
    fn without_cuda_the_device_is_refused_with_the_way_to_get_it() {
        assert!(refusal("--device cuda").contains("--features cli,cuda"));
    }

    #[test]
    fn ranks_live_in_this_process_on_gpus_unless_told_otherwise() {
        for (line, inside) in [
            ("", false),
            ("--threads", true),
            ("--device cuda", true),
            ("--device cuda --processes", false),
        ] {
            assert_eq!(parse(line).in_process(), inside, "{line}");
        }
    }

    #[test]
    fn wrong_flags_are_refused_with_the_reason() {
        for (line, what) in [
            ("-b 2K -e 1K", "no size"),
            ("-b 1K -e 2K -f 1", "never reaches"),
            ("-b 0 -e 2K", "never reaches"),
            ("-b 1K -e 2K -i 0", "never reaches"),
            ("-b 1 -e 1G -i 1", "step wider"),
            ("-b huge", "number of bytes"),
            ("--sizes 1K,huge", "number of bytes"),
            ("--sizes 1K -e 2K", "cannot be used with"),
            ("-d floaty", "int8, uint8"),
            ("-o mulsum", "sum, prod"),
            ("--ranks 0", "1 to 16"),
            ("--ranks 17", "1 to 16"),
            ("-m 0", "at least one call"),
            ("--ranks 4 --islands 0-2", "rank 3 is in no island"),
            ("--algo ring", "one_shot"),
            ("--deadline 0", "above 0"),
            ("--threads --processes", "cannot be used with"),
            ("-f 2 -i 8", "cannot be used with"),
            ("-G 1", "-G is about GPUs; it needs --device cuda"),
            ("--between", "--between is about GPUs"),
            ("--lane ipc", "--lane is about GPUs"),
            ("--lane nvlink", "vmm, ipc"),
            ("--rival nccl", "--rival nccl is about GPUs"),
            ("--nccl-lib /x", "--rival"),
            ("--foreign-kernel /x", "--between"),
        ] {
            let error = refusal(line);
            assert!(error.contains(what), "{line}: {error}");
        }
    }
}
