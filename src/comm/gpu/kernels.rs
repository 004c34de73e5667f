//! The kernels of a GPU, found by what they do. Loaded whole when a communicator is created, once per GPU and process.

use super::chain::BeginsWithStep;
use crate::device::cuda::{Context, CudaVersion, Function, Module, Uuid};
use crate::error::{Error, Result};
use crate::lane::Fan;
use crate::launch::*;
use crate::types::{DType, Op, Protocol};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// What `build.rs` compiled, or empty.
static BUILT_IN: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kernels.fatbin"));
/// Of the compiler that made it; 0.0 if that is not known.
const BUILT_WITH: &str = env!("PEERLANE_NVCC_VERSION");

/// Operands that a kernel which walks a table loads at once; the last serves any number, every type and operation.
const FANS: [&str; 5] = ["1", "3", "7", "15", "any"];
const ANY: usize = FANS.len() - 1;
/// The least of [`FANS`] that the word protocols have.
const LEAST_FAN_OF_WORDS: usize = 2;
/// The word protocols.
const WORDS: [Protocol; 2] = [Protocol::Ll, Protocol::Sentinel];
/// Phases of the tables that the unrolled kernels have room for.
const PHASES: [&str; PL_UNROLLED_PHASES as usize] = ["one", "two"];

/// Types with the fused operation, and how many operands its kernels load at once.
const NORMED: [DType; 2] = [DType::F16, DType::BF16];
const FUSED_FANS: [&str; 3] = ["3", "7", "any"];

/// Every kernel, by data type, protocol and fan-in.
#[derive(Debug)]
pub(crate) struct Kernels {
    functions: Vec<Option<Function<pl_args>>>,
    fused: Vec<Function<pl_args>>,
    norms: Vec<Function<pl_step>>,
    unrolled_1: Unrolled<pl_unrolled_1>,
    unrolled_3: Unrolled<pl_unrolled_3>,
    unrolled_7: Unrolled<pl_unrolled_7>,
    unrolled_15: Unrolled<pl_unrolled_15>,
    probe: Function<pl_probe>,
}

/// The kernels of one form of table.
#[derive(Debug)]
pub(crate) struct Unrolled<F> {
    /// By type, word protocol and number of phases.
    plain: Vec<Option<Function<F>>>,
    /// By type with the fused operation, word protocol and phases; none where `F` is too large for it.
    fused: Vec<Function<F>>,
    /// For `delta`, by type and phases; none where `F` is too large for it.
    delta: Vec<Option<Function<F>>>,
    /// The short path of the same by `sentinel`, by type and phases.
    rows: Vec<Function<F>>,
    /// The same of one phase by clusters, by type.
    clusters: Vec<Function<F>>,
}

/// A form of table, and the kernels for it.
pub(super) trait HasKernels: Fan + BeginsWithStep {
    fn of(kernels: &Kernels) -> &Unrolled<Self>;
}
macro_rules! has_kernels {
    ($($args:ident $field:ident),*) => {$(
        impl HasKernels for $args {
            fn of(kernels: &Kernels) -> &Unrolled<Self> {
                &kernels.$field
            }
        }
    )*};
}
has_kernels!(
    pl_unrolled_1 unrolled_1,
    pl_unrolled_3 unrolled_3,
    pl_unrolled_7 unrolled_7,
    pl_unrolled_15 unrolled_15
);

/// The largest form with kernels for the fused operation.
const MOST_FUSED: usize = 7;
/// The largest with kernels for `delta`.
pub(super) const MOST_DELTA: usize = 7;

impl<F: Fan> Unrolled<F> {
    fn load(module: &Module) -> Result<Self> {
        let k = F::K;
        let (mut plain, mut fused) = (Vec::new(), Vec::new());
        let (mut rows, mut clusters, mut delta) = (Vec::new(), Vec::new(), Vec::new());
        for &dtype in DType::ALL {
            for phases in PHASES {
                let name = format!("pl_unrolled_{k}_{}_delta_{phases}", short_name(dtype));
                let exists = dtype.has_sentinel() && k <= MOST_DELTA;
                delta.push(exists.then(|| module.function(&name)).transpose()?);
            }
            for protocol in WORDS {
                for phases in PHASES {
                    let name = format!("pl_unrolled_{k}_{}_{protocol}_{phases}", short_name(dtype));
                    let too_large = (k, protocol, phases) == (15, Protocol::Ll, "two");
                    let exists = dtype.has_sentinel() && !too_large;
                    plain.push(exists.then(|| module.function(&name)).transpose()?);
                }
            }
        }
        for name in NORMED.map(short_name).iter().filter(|_| k <= MOST_FUSED) {
            for protocol in WORDS {
                for phases in PHASES {
                    let name = format!("pl_unrolled_{k}_norm_{name}_{protocol}_{phases}");
                    fused.push(module.function(&name)?);
                }
            }
            for phases in PHASES {
                rows.push(module.function(&format!("pl_unrolled_{k}_rows_{name}_{phases}"))?);
            }
            clusters.push(module.function(&format!("pl_unrolled_{k}_rows_{name}_cluster"))?);
        }
        Ok(Unrolled { plain, fused, rows, clusters, delta })
    }

    /// The kernel for sums of a type by `delta`, by a table of so many phases, if there is one.
    pub fn delta(&self, dtype: DType, phases: usize) -> Option<&Function<F>> {
        self.delta.get(dtype as usize * PHASES.len() + phases - 1)?.as_ref()
    }

    /// The kernel for calls of a type over a word protocol by a table of so many phases, if there is one.
    pub fn get(
        &self,
        dtype: DType,
        protocol: Protocol,
        phases: usize,
        fused: bool,
    ) -> Option<&Function<F>> {
        let word = WORDS.iter().position(|&word| word == protocol)?;
        let at = |dtype: usize| (dtype * WORDS.len() + word) * PHASES.len() + phases - 1;
        match fused {
            true => self.fused.get(at(Kernels::normed(dtype).ok()?)),
            false => self.plain.get(at(dtype as usize))?.as_ref(),
        }
    }

    /// The kernel for the short path of rows by `sentinel`, if there is one.
    pub fn rows(&self, dtype: DType, phases: usize) -> Option<&Function<F>> {
        self.rows.get(Kernels::normed(dtype).ok()? * PHASES.len() + phases - 1)
    }

    /// The same in one phase where the blocks of a row are a cluster.
    pub fn cluster(&self, dtype: DType) -> Option<&Function<F>> {
        self.clusters.get(Kernels::normed(dtype).ok()?)
    }
}

type Cached = (Uuid, Option<PathBuf>, Weak<Kernels>);
static CACHE: Mutex<Vec<Cached>> = Mutex::new(Vec::new());

impl Kernels {
    /// The kernels for `context`'s GPU: those built in, or those of the file `path`.
    pub fn load(context: &Context, path: Option<&Path>) -> Result<Arc<Self>> {
        let uuid = context.device().facts().uuid;
        // Held while loading: the ranks of a process that share a GPU come at the same time.
        let mut cache = CACHE.lock().unwrap_or_else(PoisonError::into_inner);
        cache.retain(|(.., kernels)| kernels.strong_count() > 0);
        let same = |(gpu, from, _): &&Cached| *gpu == uuid && from.as_deref() == path;
        if let Some(kernels) = cache.iter().find(same).and_then(|(.., kernels)| kernels.upgrade()) {
            return Ok(kernels);
        }
        let kernels = Arc::new(match path {
            Some(path) => {
                let image = std::fs::read(path).map_err(|e| {
                    Error::os(format!("reading the kernels {} (PEERLANE_KERNELS)", path.display()), &e)
                })?;
                Self::from_image(context, &image, CudaVersion { major: 0, minor: 0 })?
            }
            None if BUILT_IN.is_empty() => {
                return Err(Error::Unsupported(
                    "this library was built where there was no nvcc, so it has no kernels for GPUs; build it with nvcc \
                     (CUDA_HOME), or name a fatbin of cuda/kernels.cu in PEERLANE_KERNELS"
                        .into(),
                ))
            }
            None => Self::from_image(context, BUILT_IN, version(BUILT_WITH))?,
        });
        cache.push((uuid, path.map(Path::to_path_buf), Arc::downgrade(&kernels)));
        Ok(kernels)
    }

    fn from_image(context: &Context, image: &[u8], built_with: CudaVersion) -> Result<Self> {
        let module = Module::load(context, image, built_with)?;
        let mut functions = Vec::new();
        for &dtype in DType::ALL {
            for &protocol in Protocol::ALL {
                for (fan, suffix) in FANS.iter().enumerate() {
                    let exists = if dtype.has_sentinel() {
                        protocol == Protocol::Flagged || fan >= LEAST_FAN_OF_WORDS
                    } else {
                        fan == ANY && protocol != Protocol::Sentinel
                    };
                    functions.push(match exists {
                        true => Some(module.function(&format!(
                            "pl_all_reduce_{}_{protocol}_{suffix}",
                            short_name(dtype)
                        ))?),
                        false => None,
                    });
                }
            }
        }
        let (mut fused, mut norms) = (Vec::new(), Vec::new());
        for name in NORMED.map(short_name) {
            norms.push(module.function(&format!("pl_add_rms_norm_{name}"))?);
            for protocol in Protocol::ALL {
                for suffix in FUSED_FANS {
                    let symbol = format!("pl_all_reduce_add_rms_norm_{name}_{protocol}_{suffix}");
                    fused.push(module.function(&symbol)?);
                }
            }
        }
        Ok(Kernels {
            functions,
            fused,
            norms,
            unrolled_1: Unrolled::load(&module)?,
            unrolled_3: Unrolled::load(&module)?,
            unrolled_7: Unrolled::load(&module)?,
            unrolled_15: Unrolled::load(&module)?,
            probe: module.function("pl_probe_lane")?,
        })
    }

    /// The kernel that measures.
    pub fn probe(&self) -> &Function<pl_probe> {
        &self.probe
    }

    /// The kernel for a call that walks `table`.
    pub fn get(
        &self,
        dtype: DType,
        op: Op,
        protocol: Protocol,
        table: &pl_table,
    ) -> Result<&Function<pl_args>> {
        let hot = dtype.has_sentinel() && matches!(op, Op::Sum | Op::Avg);
        let fan = match table.fan_in {
            _ if !hot => ANY,
            0..=1 => 0,
            2..=3 => 1,
            4..=7 => 2,
            _ => 3,
        };
        let fan = if protocol == Protocol::Flagged { fan } else { fan.max(LEAST_FAN_OF_WORDS) };
        let at = (dtype as usize * Protocol::ALL.len() + protocol as usize) * FANS.len() + fan;
        let function = self.functions.get(at).and_then(Option::as_ref);
        function.ok_or_else(|| Error::Internal(format!("no kernel for {dtype} {op} by {protocol}")))
    }

    /// The kernel for an all-reduce with add + RMSNorm that walks `table`.
    pub fn fused(
        &self,
        dtype: DType,
        protocol: Protocol,
        table: &pl_table,
    ) -> Result<&Function<pl_args>> {
        let fan = match table.fan_in {
            0..=3 => 0,
            4..=7 => 1,
            _ => 2,
        };
        let at =
            (Self::normed(dtype)? * Protocol::ALL.len() + protocol as usize) * FUSED_FANS.len();
        let function = self.fused.get(at + fan);
        function
            .ok_or_else(|| Error::Internal(format!("no fused kernel for {dtype} by {protocol}")))
    }

    /// The kernel for add + RMSNorm by itself.
    pub fn norm(&self, dtype: DType) -> Result<&Function<pl_step>> {
        let function = self.norms.get(Self::normed(dtype)?);
        function.ok_or_else(|| Error::Internal(format!("no norm of {dtype}")))
    }

    /// Where `dtype` stands in [`NORMED`].
    fn normed(dtype: DType) -> Result<usize> {
        let at = NORMED.iter().position(|&normed| normed == dtype);
        at.ok_or_else(|| Error::Internal(format!("add + RMSNorm of {dtype}")))
    }
}

fn version(text: &str) -> CudaVersion {
    let mut parts = text.split('.').map(|part| part.parse().unwrap_or(0));
    CudaVersion { major: parts.next().unwrap_or(0), minor: parts.next().unwrap_or(0) }
}

/// As the kernels' names have it.
fn short_name(dtype: DType) -> &'static str {
    match dtype {
        DType::I8 => "i8",
        DType::U8 => "u8",
        DType::I32 => "i32",
        DType::U32 => "u32",
        DType::I64 => "i64",
        DType::U64 => "u64",
        DType::F16 => "f16",
        DType::F32 => "f32",
        DType::F64 => "f64",
        DType::BF16 => "bf16",
    }
}
