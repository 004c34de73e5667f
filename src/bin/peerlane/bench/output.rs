//! A file that a run writes at its end.

use anyhow::{Context, Result};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// Opened before the run, so that a path that cannot be written fails at once and not after an hour of measuring.
pub struct Output<'a> {
    flag: &'static str,
    path: &'a Path,
    file: File,
}

impl<'a> Output<'a> {
    /// Creates or empties `path`, the value of `flag`.
    pub fn create(flag: &'static str, path: &'a Path) -> Result<Self> {
        let file = File::create(path)
            .with_context(|| format!("{flag}: cannot write {}", path.display()))?;
        Ok(Output { flag, path, file })
    }

    /// Has `write` fill the file.
    pub fn write(self, write: impl FnOnce(&mut dyn Write) -> std::io::Result<()>) -> Result<()> {
        let mut out = BufWriter::new(self.file);
        write(&mut out)
            .and_then(|()| out.flush())
            .with_context(|| format!("{}: cannot write {}", self.flag, self.path.display()))
    }
}
