//! Threads of the library's own, inside somebody else's process.

use crate::error::{Error, Result};
use std::thread::{Builder, JoinHandle};

/// A thread that takes no signals and outlives nothing: who holds it waits for its end with [`Background::join`].
#[derive(Debug)]
pub(crate) struct Background {
    handle: Option<JoinHandle<()>>,
    pid: u32,
}

impl Background {
    pub(crate) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<Self> {
        let handle = without_signals(|| Builder::new().name(name.to_owned()).spawn(work))
            .map_err(|e| Error::os(format!("pthread_create({name})"), &e))?;
        Ok(Background { handle: Some(handle), pid: std::process::id() })
    }

    /// False in a forked child: the thread stayed with the parent, and so did whoever held a lock at the fork.
    pub(crate) fn is_here(&self) -> bool {
        self.pid == std::process::id()
    }

    /// Waits for its end, unless it is the calling thread (which cannot wait for itself) or the parent's.
    pub(crate) fn join(mut self) {
        if !self.is_here() {
            return;
        }
        if let Some(handle) = self.handle.take() {
            if handle.thread().id() != std::thread::current().id() {
                let _ = handle.join();
            }
        }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if !self.is_here() {
            // The handle names a thread that does not exist in this process; detaching it would touch memory of its
            // stack.
            std::mem::forget(self.handle.take());
        }
    }
}

/// Runs `spawn` with all signals blocked, which the new thread inherits: the application's handlers run on its own
/// threads only.
pub(crate) fn without_signals<T>(spawn: impl FnOnce() -> T) -> T {
    // SAFETY: both sets are initialised by the calls before they are read; restoring the mask that was there is always
    // allowed.
    unsafe {
        let mut all = std::mem::zeroed();
        let mut old = std::mem::zeroed();
        libc::sigfillset(&mut all);
        let changed = libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut old) == 0;
        let result = spawn();
        if changed {
            libc::pthread_sigmask(libc::SIG_SETMASK, &old, std::ptr::null_mut());
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    fn blocks(signal: i32) -> bool {
        // SAFETY: a null set changes nothing; `now` is written before it is read.
        unsafe {
            let mut now = std::mem::zeroed();
            assert_eq!(libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &mut now), 0);
            libc::sigismember(&now, signal) == 1
        }
    }

    #[test]
    fn signals_go_to_the_applications_own_threads() {
        let (send, receive) = mpsc::channel();
        let ask = move || {
            let _ = send.send([libc::SIGINT, libc::SIGTERM, libc::SIGALRM].map(blocks));
        };
        Background::spawn("test", ask).unwrap().join();
        assert_eq!(receive.recv().unwrap(), [true; 3]);
        // Control: the thread that spawned has its mask back.
        assert!(!blocks(libc::SIGINT));
    }

    #[test]
    fn a_thread_that_joins_itself_goes_on() {
        let (send, receive) = mpsc::channel::<Background>();
        let (tell, told) = mpsc::channel();
        let thread = Background::spawn("test", move || {
            receive.recv().unwrap().join();
            tell.send(()).unwrap();
        });
        send.send(thread.unwrap()).unwrap();
        told.recv_timeout(std::time::Duration::from_secs(10)).unwrap();
    }
}
