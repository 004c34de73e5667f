//! The directory that rendezvous sockets live in: the user's own, closed to everybody else.

use crate::env::Env;
use crate::error::{Error, Result};
use std::ffi::CString;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

pub(super) fn effective_uid() -> u32 {
    // SAFETY: geteuid has no preconditions.
    unsafe { libc::geteuid() }
}

/// Where sockets go when the caller names no directory: `PEERLANE_RUN_DIR`, else `$XDG_RUNTIME_DIR/peerlane`, else
/// `/tmp/peerlane-UID`.
///
/// `XDG_RUNTIME_DIR` counts only if it is a directory of this user: under `su` and `sudo` it is still the other user's.
pub(super) fn default_dir(env: &Env) -> PathBuf {
    if let Some(dir) = &env.run_dir {
        return dir.clone();
    }
    let uid = effective_uid();
    match &env.xdg_runtime_dir {
        Some(xdg) if std::fs::metadata(xdg).is_ok_and(|m| m.is_dir() && m.uid() == uid) => {
            xdg.join("peerlane")
        }
        _ => PathBuf::from(format!("/tmp/peerlane-{uid}")),
    }
}

/// A run directory that was found safe.
#[derive(Debug)]
pub(super) struct RunDir {
    path: PathBuf,
}

impl RunDir {
    /// Makes `path` with mode 0700 where it does not exist, then opens it.
    pub(super) fn create(path: &Path) -> Result<Self> {
        match DirBuilder::new().mode(0o700).create(path) {
            Err(e) if e.kind() != ErrorKind::AlreadyExists => Err(Error::os(
                format!(
                    "mkdir({}), the run directory (set PEERLANE_RUN_DIR to a directory you own)",
                    path.display()
                ),
                &e,
            )),
            _ => Self::open(path)?.ok_or_else(|| Error::System {
                call: format!("open({})", path.display()),
                detail: "the run directory vanished right after it was made".into(),
            }),
        }
    }

    /// Checks that `path` is a directory of this user that nobody else can enter; `None` if it does not exist.
    pub(super) fn open(path: &Path) -> Result<Option<Self>> {
        let refuse = |why: String| {
            Err(Error::InvalidArgument(format!("the run directory {} {why}", path.display())))
        };
        // O_NOFOLLOW: a symbolic link in /tmp is how another user would lead us into a directory of theirs.
        let file: File = match OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW | libc::O_CLOEXEC)
            .open(path)
        {
            Ok(file) => file,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) if matches!(e.raw_os_error(), Some(libc::ELOOP | libc::ENOTDIR)) => {
                return refuse(
                    "is a symbolic link or no directory: remove it, or set PEERLANE_RUN_DIR to a \
                     directory you own"
                        .into(),
                )
            }
            Err(e) => return Err(Error::os(format!("open({})", path.display()), &e)),
        };
        let meta =
            file.metadata().map_err(|e| Error::os(format!("fstat({})", path.display()), &e))?;
        let uid = effective_uid();
        if meta.uid() != uid {
            return refuse(format!(
                "belongs to uid {}, this process runs as uid {uid}: remove it, or set \
                 PEERLANE_RUN_DIR to a directory you own",
                meta.uid()
            ));
        }
        if meta.mode() & 0o077 != 0 {
            return refuse(format!(
                "is open to others (mode {:04o}): chmod 700 {}",
                meta.mode() & 0o7777,
                path.display()
            ));
        }
        Ok(Some(RunDir { path: path.to_path_buf() }))
    }

    /// The path of a socket in it.
    pub(super) fn socket(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

/// Removes `path`; it is fine if it is gone already.
pub(super) fn unlink(path: &Path) {
    if let Ok(path) = CString::new(path.as_os_str().as_bytes()) {
        // SAFETY: `path` is a C string that outlives the call.
        unsafe { libc::unlink(path.as_ptr()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{symlink, PermissionsExt};

    fn scratch(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("pl-run-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir(&dir).unwrap();
        dir
    }

    #[test]
    fn a_new_directory_is_closed_to_others_and_is_accepted_again() {
        let parent = scratch("new");
        let dir = parent.join("run");
        assert!(RunDir::open(&dir).unwrap().is_none());
        RunDir::create(&dir).unwrap();
        assert_eq!(std::fs::metadata(&dir).unwrap().mode() & 0o7777, 0o700);
        RunDir::create(&dir).unwrap();
        std::fs::remove_dir_all(parent).unwrap();
    }

    #[test]
    fn links_files_and_open_directories_are_refused_with_the_remedy() {
        let parent = scratch("bad");
        let real = parent.join("real");
        RunDir::create(&real).unwrap();

        let link = parent.join("link");
        symlink(&real, &link).unwrap();
        let error = RunDir::create(&link).unwrap_err().to_string();
        assert!(error.contains("symbolic link") && error.contains("PEERLANE_RUN_DIR"), "{error}");

        let file = parent.join("file");
        std::fs::write(&file, "").unwrap();
        let error = RunDir::create(&file).unwrap_err().to_string();
        assert!(error.contains("no directory"), "{error}");

        std::fs::set_permissions(&real, std::fs::Permissions::from_mode(0o750)).unwrap();
        let error = RunDir::create(&real).unwrap_err().to_string();
        assert!(error.contains("0750") && error.contains("chmod 700"), "{error}");

        let error = RunDir::create(&parent.join("a/b")).unwrap_err().to_string();
        assert!(error.contains("mkdir") && error.contains("PEERLANE_RUN_DIR"), "{error}");
        std::fs::remove_dir_all(parent).unwrap();
    }

    #[test]
    fn a_directory_of_another_user_is_refused() {
        if effective_uid() != 0 {
            eprintln!("needs root to give a directory away; not run");
            return;
        }
        let parent = scratch("foreign");
        let dir = parent.join("run");
        RunDir::create(&dir).unwrap();
        std::os::unix::fs::chown(&dir, Some(12345), None).unwrap();
        let error = RunDir::create(&dir).unwrap_err().to_string();
        assert!(error.contains("uid 12345"), "{error}");
        std::fs::remove_dir_all(parent).unwrap();
    }

    #[test]
    fn the_variable_comes_before_the_users_runtime_directory_before_tmp() {
        let tmp = PathBuf::from(format!("/tmp/peerlane-{}", effective_uid()));
        let mut env = Env::default();
        assert_eq!(default_dir(&env), tmp);
        env.xdg_runtime_dir = Some("/nonexistent".into());
        assert_eq!(default_dir(&env), tmp);
        let own = scratch("xdg");
        env.xdg_runtime_dir = Some(own.clone());
        assert_eq!(default_dir(&env), own.join("peerlane"));
        env.run_dir = Some("/else".into());
        assert_eq!(default_dir(&env), PathBuf::from("/else"));
        std::fs::remove_dir_all(own).unwrap();
    }
}
