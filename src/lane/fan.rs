//! The arguments of the kernels with unrolled loops, whatever their fan.

use crate::launch::*;

/// The arguments of a kernel with room for [`K`](Fan::K) sends and `K + 1` operands a phase.
pub trait Fan: Copy {
    /// Most sends of a phase.
    const K: usize;
    /// Everything zero.
    fn zeroed() -> Self;
    /// What every step has.
    fn step(&mut self) -> &mut pl_step;
    /// What stands before the phases.
    fn head(&mut self) -> Head<'_>;
    /// One of `PL_UNROLLED_PHASES` phases.
    fn phase(&mut self, index: usize) -> PhaseMut<'_>;
}

/// The fields of a `pl_unrolled_*` before its phases, see `cuda/launch.h`.
#[allow(missing_docs)]
pub struct Head<'a> {
    pub phases: &'a mut u16,
    pub straight: &'a mut u16,
    pub widest: &'a mut u32,
}

/// The fields of a `pl_unrolled_phase_*`, see `cuda/launch.h`.
#[allow(missing_docs)]
pub struct PhaseMut<'a> {
    pub to: &'a mut [u64],
    pub at: &'a mut [u64],
    pub own_piece: &'a mut u32,
    pub send_piece: &'a mut [u32],
    pub copy_piece: &'a mut [u32],
    pub send_first: &'a mut [u32],
    pub send_packs: &'a mut [u32],
    pub item_first: &'a mut [u32],
    pub item_packs: &'a mut [u32],
    pub fold: &'a mut u32,
    pub present: &'a mut u32,
    pub remote: &'a mut u32,
    pub one_source: &'a mut u8,
    pub result: &'a mut u8,
    pub from: &'a mut [u8],
}

macro_rules! fans {
    ($($k:literal $args:ident),*) => {$(
        impl Fan for $args {
            const K: usize = $k;
            fn zeroed() -> Self {
                // SAFETY: integers and raw pointers, for which zero is a value.
                unsafe { std::mem::zeroed() }
            }
            fn step(&mut self) -> &mut pl_step {
                &mut self.step
            }
            fn head(&mut self) -> Head<'_> {
                Head {
                    phases: &mut self.phases,
                    straight: &mut self.straight,
                    widest: &mut self.widest,
                }
            }
            fn phase(&mut self, index: usize) -> PhaseMut<'_> {
                let phase = &mut self.phase[index];
                PhaseMut {
                    to: &mut phase.to,
                    at: &mut phase.at,
                    own_piece: &mut phase.own_piece,
                    send_piece: &mut phase.send_piece,
                    copy_piece: &mut phase.copy_piece,
                    send_first: &mut phase.send_first,
                    send_packs: &mut phase.send_packs,
                    item_first: &mut phase.item_first,
                    item_packs: &mut phase.item_packs,
                    fold: &mut phase.fold,
                    present: &mut phase.present,
                    remote: &mut phase.remote,
                    one_source: &mut phase.one_source,
                    result: &mut phase.result,
                    from: &mut phase.from,
                }
            }
        }
    )*};
}
fans!(1 pl_unrolled_1, 3 pl_unrolled_3, 7 pl_unrolled_7, 15 pl_unrolled_15);
