//! The kernels' parameters, field by field those of `cuda/launch.h`; a test compares their sizes, and so does the driver when
//! a kernel is looked up.

/// Keys of a sequence that one block of the attention sees; caches have so many rows of zeros at their end.
pub const CHUNK: usize = 128;
/// Queries (a row and a head each) of such a block.
pub const QUERIES: usize = 16;
pub const MOST_CACHE_WIDTH: usize = 640;
pub const MOST_EXPERTS: usize = 512;
pub const MOST_KEPT: usize = 16;
/// Most rows that the kernels of few rows take.
pub const FEW_ROWS: usize = 16;
/// Columns of a product that a warp computes, and of the one with the norm of its rows in it.
pub const STRIP: usize = 32;
pub const NARROW_STRIP: usize = 16;
/// Chunks of keys that the product with values puts together itself.
pub const FEW_CHUNKS: usize = 40;
/// Parts of the hidden dimension that blocks of the router take, and experts of a block.
pub const ROUTER_PARTS: usize = 4;
pub const ROUTER_EXPERTS: usize = 16;
/// Outputs that a block of the down product computes.
pub const OUTPUTS: usize = 128;
/// Inner elements that a block of the gate product computes.
pub const INNER: usize = 8;

/// A kernel's parameter.
pub trait Arguments: Copy {
    /// The kernel that takes it.
    const NAME: &'static str;
    /// Threads of a block.
    const THREADS: u32;
    /// Blocks of the grid.
    fn blocks(&self) -> u32;
}

macro_rules! arguments {
    ($($(#[$about:meta])* $name:ident: $kernel:literal, $threads:literal {
        $($(#[$doc:meta])* $field:ident: $type:ty,)*
    })*) => {$(
        $(#[$about])*
        #[derive(Clone, Copy, Debug, Default)]
        #[repr(C)]
        pub struct $name {
            pub blocks: u32,
            $($(#[$doc])* pub $field: $type,)*
        }
        impl Arguments for $name {
            const NAME: &'static str = $kernel;
            const THREADS: u32 = $threads;
            fn blocks(&self) -> u32 {
                self.blocks
            }
        }
    )*
    /// Name and size of every parameter.
    #[cfg(test)]
    pub const SIZES: &[(&str, usize)] = &[$(($kernel, size_of::<$name>()),)*];
    };
}

/// A batch as every kernel reads it.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Rows {
    pub tokens: u64,
    pub positions: u64,
    pub visible: u64,
    pub sequence: u64,
    pub slots: u64,
    pub blocks: u64,
    pub rows: u32,
    pub sequences: u32,
}

arguments! {
    /// A rectangle of a tensor from a seed.
    Fill: "verify_fill", 256 {
        wide: u32,
        out: u64,
        key: u64,
        first: u64,
        columns: u64,
        between: u64,
        count: u64,
        centre: f32,
        reach: f32,
    }
    Embed: "verify_embed", 256 {
        width: u32,
        batch: Rows,
        table: u64,
        out: u64,
    }
    AddNorm: "verify_add_norm", 256 {
        width: u32,
        x: u64,
        residual: u64,
        gamma: u64,
        out: u64,
        eps: f32,
        unused: u32,
    }
    Latents: "verify_latents", 256 {
        query_latent: u32,
        kv_latent: u32,
        rotary: u32,
        batch: Rows,
        fused: u64,
        query_gamma: u64,
        key_gamma: u64,
        turns: u64,
        query_latents: u64,
        cache: u64,
        eps: f32,
        unused: u32,
    }
    /// `out = x weights^T` for few rows.
    FewRows: "verify_few_rows", 256 {
        rows: u32,
        inner: u32,
        columns: u32,
        splits: u32,
        wide: u32,
        x: u64,
        weights: u64,
        out: u64,
    }
    QueryUp: "verify_query_up", 256 {
        query_latent: u32,
        kv_latent: u32,
        rotary: u32,
        columns: u32,
        splits: u32,
        batch: Rows,
        fused: u64,
        query_gamma: u64,
        key_gamma: u64,
        turns: u64,
        weights: u64,
        out: u64,
        cache: u64,
        eps: f32,
        unused: u32,
    }
    Queries: "verify_queries", 256 {
        heads: u32,
        plain: u32,
        rotary: u32,
        latent: u32,
        splits: u32,
        batch: Rows,
        q: u64,
        key_up: u64,
        turns: u64,
        out: u64,
    }
    TurnOver: "verify_turn_over", 256 {
        heads: u32,
        rows: u32,
        columns: u32,
        input: u64,
        out: u64,
    }
    Values: "verify_values", 256 {
        heads: u32,
        latent: u32,
        value: u32,
        tiles: u32,
        chunks: u32,
        batch: Rows,
        parts: u64,
        stats: u64,
        value_up: u64,
        out: u64,
        splits: u32,
        unused: u32,
    }
    Rotate: "verify_rotate", 256 {
        heads: u32,
        plain: u32,
        rotary: u32,
        latent: u32,
        unused: u32,
        batch: Rows,
        q: u64,
        turns: u64,
        out: u64,
    }
    Attend: "verify_attend", 256 {
        heads: u32,
        latent: u32,
        width: u32,
        tiles: u32,
        chunks: u32,
        batch: Rows,
        queries: u64,
        cache: u64,
        parts: u64,
        stats: u64,
        out: u64,
        scale: f32,
        unused: u32,
    }
    /// The same fields, for the kernel that puts the chunks together.
    Merge: "verify_merge", 128 {
        heads: u32,
        latent: u32,
        width: u32,
        tiles: u32,
        chunks: u32,
        batch: Rows,
        queries: u64,
        cache: u64,
        parts: u64,
        stats: u64,
        out: u64,
        scale: f32,
        unused: u32,
    }
    Route: "verify_choice", 256 {
        rows: u32,
        experts: u32,
        groups: u32,
        kept_groups: u32,
        kept: u32,
        unused: u32,
        scale: f32,
        logits: u64,
        bias: u64,
        chosen: u64,
        weights: u64,
    }
    Router: "verify_router", 256 {
        hidden: u32,
        route: Route,
        x: u64,
        gate: u64,
        arrived: u64,
    }
    Dispatch: "verify_dispatch", 512 {
        experts: u32,
        pairs: u32,
        unused: u32,
        chosen: u64,
        slots: u64,
        order: u64,
    }
    GateUp: "verify_gate_up", 256 {
        rows: u32,
        hidden: u32,
        pairs: u32,
        kept: u32,
        experts: u32,
        always_width: u32,
        width: u32,
        x: u64,
        always: u64,
        weights: u64,
        chosen: u64,
        slots: u64,
        order: u64,
        product: u64,
        inner: u64,
    }
    Down: "verify_down", 256 {
        rows: u32,
        hidden: u32,
        kept: u32,
        always_width: u32,
        width: u32,
        product: u64,
        always: u64,
        inner: u64,
        weights: u64,
        chosen: u64,
        scales: u64,
        out: u64,
    }
    Choose: "verify_choose", 512 {
        width: u32,
        first: u32,
        unused: u32,
        logits: u64,
        keys: u64,
    }
    Accept: "verify_accept", 32 {
        unused: u32,
        batch: Rows,
        keys: u64,
        accepted: u64,
    }
    Stamp: "verify_stamp", 32 {
        unused: u32,
        out: u64,
    }
}
