//! The library's background threads, as threads of the model.

use crate::error::Result;

#[derive(Debug)]
pub(crate) struct Background(loom::thread::JoinHandle<()>);

impl Background {
    pub(crate) fn spawn(_name: &str, work: impl FnOnce() + Send + 'static) -> Result<Self> {
        Ok(Background(loom::thread::spawn(work)))
    }

    pub(crate) fn is_here(&self) -> bool {
        true
    }

    pub(crate) fn join(self) {
        self.0.join().unwrap();
    }
}
