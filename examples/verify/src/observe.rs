//! Looking into a pass. Only a pass that is carried out call by call can be observed; one that is captured cannot.

use crate::device::Device;
use anyhow::Result;

/// Which of a layer's two halves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Half {
    Attention,
    Mlp,
}

/// Which of a pass's all-reduces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Site {
    pub layer: usize,
    pub half: Half,
}

/// Told what goes into every all-reduce and what comes out.
pub trait Observer<D: Device> {
    /// This rank's input.
    fn partial(&mut self, _: &mut D, _: Site, _: &D::Buffer, _elements: usize) -> Result<()> {
        Ok(())
    }
    /// The sum over all ranks; where the operation is fused, it stands nowhere.
    fn reduced(&mut self, _: &mut D, _: Site, _: &D::Buffer, _elements: usize) -> Result<()> {
        Ok(())
    }
    /// The residual with the sum added.
    fn residual(&mut self, _: &mut D, _: Site, _: &D::Buffer, _elements: usize) -> Result<()> {
        Ok(())
    }
}

/// Looks at nothing.
pub struct Unobserved;

impl<D: Device> Observer<D> for Unobserved {}
