//! Data types, operations, protocols and algorithms: the vocabulary that every other module shares.
//!
//! Numbers are part of the C ABI; `DType` and `Op` carry NCCL's.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// Most ranks of a communicator.
pub const MAX_RANKS: usize = 16;
/// Most islands of a communicator.
pub const MAX_ISLANDS: usize = 4;
/// Bytes of a pack, the unit in which a message is cut and moved.
pub const PACK_BYTES: usize = 16;

/// Makes a plain enum whose variants have a fixed number and a name that users type and read.
macro_rules! named_enum {
    ($(#[$meta:meta])* $name:ident, $what:literal { $($(#[$vmeta:meta])* $variant:ident = $value:literal, $text:literal;)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[repr(u32)]
        pub enum $name { $($(#[$vmeta])* $variant = $value,)+ }

        impl $name {
            /// Every value, in order of its number.
            pub const ALL: &'static [$name] = &[$($name::$variant,)+];

            /// The name users type and read.
            pub const fn name(self) -> &'static str {
                match self { $($name::$variant => $text,)+ }
            }

            /// The value with this number, as it crosses the C ABI.
            pub fn from_raw(raw: u32) -> Result<Self> {
                match raw {
                    $($value => Ok($name::$variant),)+
                    _ => Err(Error::InvalidArgument(format!(
                        "{raw} is no {}; known are {}", $what,
                        Self::ALL.iter().map(|v| format!("{} ({})", v.name(), *v as u32)).collect::<Vec<_>>().join(", ")
                    ))),
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.name())
            }
        }

        impl std::str::FromStr for $name {
            type Err = Error;
            fn from_str(text: &str) -> Result<Self> {
                Self::ALL.iter().copied().find(|v| v.name() == text).ok_or_else(|| {
                    Error::InvalidArgument(format!(
                        "'{text}' is no {}; known are {}", $what,
                        Self::ALL.iter().map(|v| v.name()).collect::<Vec<_>>().join(", ")
                    ))
                })
            }
        }
    };
}

named_enum! {
    /// Element type of a message.
    DType, "data type" {
        /// 8-bit signed integer.
        I8 = 0, "int8";
        /// 8-bit unsigned integer.
        U8 = 1, "uint8";
        /// 32-bit signed integer.
        I32 = 2, "int32";
        /// 32-bit unsigned integer.
        U32 = 3, "uint32";
        /// 64-bit signed integer.
        I64 = 4, "int64";
        /// 64-bit unsigned integer.
        U64 = 5, "uint64";
        /// IEEE half precision.
        F16 = 6, "half";
        /// IEEE single precision.
        F32 = 7, "float";
        /// IEEE double precision.
        F64 = 8, "double";
        /// bfloat16.
        BF16 = 9, "bfloat16";
    }
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::I8 | DType::U8 => 1,
            DType::F16 | DType::BF16 => 2,
            DType::I32 | DType::U32 | DType::F32 => 4,
            DType::I64 | DType::U64 | DType::F64 => 8,
        }
    }

    /// Bytes of one accumulator: partial sums of 16-bit floats are kept and sent as f32, all others in the type itself.
    pub const fn acc_size(self) -> usize {
        match self {
            DType::F16 | DType::BF16 => 4,
            other => other.size(),
        }
    }

    /// Whether the `sentinel` protocol can carry it: only where every all-ones 32-bit word is a NaN.
    pub const fn has_sentinel(self) -> bool {
        matches!(self, DType::F16 | DType::BF16 | DType::F32)
    }
}

named_enum! {
    /// Reduction operation.
    Op, "operation" {
        /// Sum along the communicator's tree.
        Sum = 0, "sum";
        /// Product along the tree.
        Prod = 1, "prod";
        /// Maximum; a NaN counts only if all are NaN, and -0 < +0.
        Max = 2, "max";
        /// Minimum; likewise.
        Min = 3, "min";
        /// The sum divided by the number of ranks.
        Avg = 4, "avg";
    }
}

named_enum! {
    /// How a word is known to have arrived; see `docs/protocols.md`.
    Protocol, "protocol" {
        /// 64-bit words: 32 bits of data, 32 bits of tag.
        Ll = 0, "ll";
        /// 32-bit words; all-ones means "not written yet".
        Sentinel = 1, "sentinel";
        /// Bulk data and one release flag per chunk.
        Flagged = 2, "flagged";
    }
}

named_enum! {
    /// The algorithms that schedules exist for.
    Algorithm, "algorithm" {
        /// Push all to all, reduce locally.
        OneShot = 0, "one_shot";
        /// Reduce-scatter, then all-gather, flat.
        TwoShot = 1, "two_shot";
        /// Reduce-scatter in the island, swap partials between islands, all-gather in the island.
        Hierarchical = 2, "hierarchical";
        /// Reduce-scatter to an owner in every island at once, all-gather in the island.
        DualOwner = 3, "dual_owner";
        /// Exchange along the tree, leaves first.
        Pairwise = 4, "pairwise";
        /// `hierarchical` as permutation passes, one stream in and one out per rank.
        Staged = 5, "staged";
    }
}

named_enum! {
    /// How ranks on GPUs reach each other's slabs.
    Lane, "lane" {
        /// The best that all ranks can use: `vmm`, else `ipc`, else `host`.
        Auto = 0, "auto";
        /// Device memory shared as file descriptors (CUDA's virtual memory calls).
        Vmm = 1, "vmm";
        /// Device memory shared as CUDA IPC handles.
        Ipc = 2, "ipc";
        /// Host-staged: pinned host memory of the receiver, for GPUs without peer access.
        Host = 3, "host";
    }
}

named_enum! {
    /// Whether creation measures what the lane does. That it delivers is verified in any case.
    ProbeMode, "probe mode" {
        /// Where the ranks run on several GPUs, none of them shared by processes, which take turns on it; once per boot.
        Auto = 0, "auto";
        /// Never, and what is known from earlier is not used.
        Off = 1, "off";
        /// At every creation, on any device, lanes once found broken included.
        Always = 2, "always";
        /// The same, and every pair of ranks by itself: what `peerlane doctor --live` does.
        Pairs = 3, "pairs";
    }
}

/// Where a communicator's ranks run; all ranks name the same kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Device {
    /// Threads and processes of the CPU.
    #[default]
    Cpu,
    /// An NVIDIA GPU.
    Cuda {
        /// Its number in this process; `None` is the GPU of the calling thread's current context, or else the first.
        ordinal: Option<u32>,
    },
}

impl std::str::FromStr for Device {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        match text.split_once(':') {
            None if text == "cpu" => Ok(Device::Cpu),
            None if text == "cuda" => Ok(Device::Cuda { ordinal: None }),
            Some(("cuda", number)) if number.bytes().all(|b| b.is_ascii_digit()) => match number
                .parse()
            {
                Ok(ordinal) => Ok(Device::Cuda { ordinal: Some(ordinal) }),
                Err(_) => Err(Error::InvalidArgument(format!("'{number}' is no number of a GPU"))),
            },
            _ => Err(Error::InvalidArgument(format!(
                "'{text}' is no device; known are cpu, cuda, cuda:N"
            ))),
        }
    }
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda { ordinal: None } => f.write_str("cuda"),
            Device::Cuda { ordinal: Some(ordinal) } => write!(f, "cuda:{ordinal}"),
        }
    }
}

named_enum! {
    /// Who moves the data.
    Direction, "direction" {
        /// The writer stores into the reader's slab.
        Push = 0, "push";
        /// The writer stores into its own slab and the reader loads from there (`flagged` alone).
        Pull = 1, "pull";
    }
}
