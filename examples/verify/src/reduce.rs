//! What stands between the halves of layers: sum the ranks' partial results, add the residual, norm.

use crate::device::Device;
use crate::observe::{Half, Observer, Site};
use crate::pass::Activations;
use crate::stamp::{Kind, Part};
use anyhow::Result;
use peerlane::comm::Communicator;

/// Who sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AllReduce {
    /// This library.
    Peerlane,
    /// NCCL, for ranks on GPUs.
    Nccl,
    /// Nobody: the pass computes nonsense, and its time is that of everything else.
    None,
}

/// Over whom an operation of a device sums, and by whom; never by nobody.
#[derive(Clone, Copy)]
pub struct Over<'a> {
    pub comm: &'a Communicator,
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub by: AllReduce,
}

/// A rank's way of reducing.
pub struct Reduce {
    pub comm: Communicator,
    pub by: AllReduce,
    /// Whether residual add and norm are part of the all-reduce, on devices that can.
    pub fused: bool,
    /// Whether ranks wait for each other before each all-reduce, so that its time does not hold the time by which another
    /// rank was late.
    pub barrier: bool,
}

impl Reduce {
    /// Where ranks work together.
    pub fn over_ranks(&self) -> Option<Over<'_>> {
        (self.by != AllReduce::None).then_some(Over { comm: &self.comm, by: self.by })
    }

    /// From `partial` and `residual` to the new `residual` and `normed`.
    #[allow(clippy::too_many_arguments)]
    pub fn add_norm<D: Device>(
        &self,
        device: &mut D,
        kind: Kind,
        site: Site,
        gamma: &D::Weight,
        eps: f32,
        rows: usize,
        act: &mut Activations<D>,
        observer: &mut dyn Observer<D>,
    ) -> Result<()> {
        device
            .stamp(kind, if site.half == Half::Attention { Part::Attention } else { Part::Mlp })?;
        let elements = rows * device.dims().hidden;
        observer.partial(device, site, &act.partial, elements)?;
        if self.barrier {
            device.barrier(&self.comm)?;
            device.stamp(kind, Part::Wait)?;
        }
        self.sum_and_norm(device, kind, site, gamma, eps, rows, act, observer)?;
        observer.residual(device, site, &act.residual, elements)
    }

    /// The same without what stands around it.
    #[allow(clippy::too_many_arguments)]
    pub fn sum_and_norm<D: Device>(
        &self,
        device: &mut D,
        kind: Kind,
        site: Site,
        gamma: &D::Weight,
        eps: f32,
        rows: usize,
        act: &mut Activations<D>,
        observer: &mut dyn Observer<D>,
    ) -> Result<()> {
        let elements = rows * device.dims().hidden;
        if self.by == AllReduce::Peerlane && self.fused && device.fuses() {
            device.all_reduce_add_rms_norm(
                &self.comm,
                &act.partial,
                &mut act.residual,
                gamma,
                eps,
                &mut act.normed,
                rows,
            )?;
            device.stamp(kind, Part::AllReduce)
        } else {
            if let Some(over) = self.over_ranks() {
                device.all_reduce(over, &mut act.partial, elements)?;
            }
            device.stamp(kind, Part::AllReduce)?;
            observer.reduced(device, site, &act.partial, elements)?;
            device.add_rms_norm(
                &act.partial,
                &mut act.residual,
                gamma,
                eps,
                &mut act.normed,
                rows,
            )?;
            device.stamp(kind, Part::Norm)
        }
    }
}
