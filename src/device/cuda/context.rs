//! Primary contexts. The one that PyTorch and every runtime-API program use is retained, never configured, and is made
//! current only inside a guard that puts the caller's own context back.

use super::device::Device;
use super::driver::Driver;
use super::graph::RelaxedThread;
use super::symbols::Symbols;
use crate::error::Result;
use cudarc::driver::sys;
use std::marker::PhantomData;
use std::sync::Arc;

/// A device's primary context, kept alive. Clones share it.
#[derive(Clone, Debug)]
pub struct Context(Arc<Primary>);

#[derive(Debug)]
struct Primary {
    device: Device,
    raw: sys::CUcontext,
}

// SAFETY: a context handle may be used from any thread; the driver synchronises inside.
unsafe impl Send for Primary {}
// SAFETY: as above.
unsafe impl Sync for Primary {}

impl Context {
    /// Retains the primary context of `device`, which is refused where it cannot carry a rank.
    pub fn retain(device: &Device) -> Result<Self> {
        device.check_usable()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle; it is released once, by `Primary`'s drop.
        unsafe { device.driver().symbols().cuDevicePrimaryCtxRetain(&mut raw, device.raw()) }?;
        Ok(Context(Arc::new(Primary { device: device.clone(), raw })))
    }

    /// The device it belongs to.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// The driver it was made by.
    pub fn driver(&self) -> Driver {
        self.0.device.driver()
    }

    pub(super) fn raw(&self) -> sys::CUcontext {
        self.0.raw
    }

    /// Makes the context current on this thread until the guard goes. Where it is current already, as in a framework's own
    /// threads, this is one look-up.
    pub fn enter(&self) -> Result<Entered<'_>> {
        let symbols = self.driver().symbols();
        let mut current = std::ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { symbols.cuCtxGetCurrent(&mut current) }?;
        let pushed = current != self.0.raw;
        if pushed {
            // Push and pop, not set: the caller's stack of contexts comes back as it was, an empty one included.
            // SAFETY: the context is retained.
            unsafe { symbols.cuCtxPushCurrent_v2(self.0.raw) }?;
        }
        Ok(Entered { context: self, pushed, not_send: PhantomData })
    }
}

impl Context {
    /// Gives something back to the driver, in the context, where any thread may be capturing: freeing has nothing to do with
    /// what is captured, and refused it would leak and break the capture.
    pub(super) fn give_back<T>(&self, free: impl FnOnce(&'static Symbols) -> T) -> Option<T> {
        let entered = self.enter().ok()?;
        let _relaxed = RelaxedThread::new(&entered).ok();
        Some(free(entered.symbols()))
    }
}

impl Drop for Primary {
    fn drop(&mut self) {
        // At process exit the driver may be gone before this; there is nobody left to tell.
        // SAFETY: retained once, released once.
        let _ = unsafe {
            self.device.driver().symbols().cuDevicePrimaryCtxRelease_v2(self.device.raw())
        };
    }
}

/// Proof that a context is current on this thread. Dropping it restores what was current before; guards are dropped in the
/// reverse order of their making, as scopes do.
#[derive(Debug)]
pub struct Entered<'a> {
    context: &'a Context,
    pushed: bool,
    /// Current contexts are a thread's own.
    not_send: PhantomData<*const ()>,
}

impl Entered<'_> {
    /// The context that is current.
    pub fn context(&self) -> &Context {
        self.context
    }

    pub(super) fn symbols(&self) -> &'static Symbols {
        self.context.driver().symbols()
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = std::ptr::null_mut();
            // SAFETY: pops what `enter` pushed.
            let _ = unsafe { self.symbols().cuCtxPopCurrent_v2(&mut popped) };
        }
    }
}
