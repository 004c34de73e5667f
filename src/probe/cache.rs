//! Verdicts on disk, a file per set of GPUs, in a directory of the user's own.
//!
//! A file is trusted only if it belongs to this user, nobody else can write to it, its checksum is right and it is about
//! exactly this key: these GPUs, driver, boot, library. Anything else counts as no file. It is replaced as a whole, by
//! rename, so that a reader finds the old one or the new one. Not being able to keep a verdict costs a measurement, so
//! nothing here fails a communicator.

use super::verdict::Verdicts;
use crate::bootstrap::random;
use crate::env::Env;
use crate::error::{Error, Result};
use crate::log::log;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Changes with the format of the file.
const MAGIC: [u8; 8] = *b"plprobe2";
/// Far above what 16 ranks need.
const MOST_BYTES: u64 = 1 << 20;

/// Where verdicts are kept: `PEERLANE_CACHE_DIR`, else `$XDG_CACHE_HOME/peerlane`, else `$HOME/.cache/peerlane`; none where
/// none of the three is set.
pub(crate) fn default_dir(env: &Env) -> Option<PathBuf> {
    let absolute = |path: &Option<PathBuf>| path.clone().filter(|path| path.is_absolute());
    env.cache_dir.clone().or_else(|| {
        let cache = absolute(&env.xdg_cache_home);
        let cache = cache.or_else(|| absolute(&env.home).map(|home| home.join(".cache")))?;
        Some(cache.join("peerlane"))
    })
}

/// The file of one key.
#[derive(Clone, Debug)]
pub(crate) struct Cache {
    dir: PathBuf,
    key: String,
}

impl Cache {
    pub fn new(dir: &Path, key: String) -> Self {
        Cache { dir: dir.to_path_buf(), key }
    }

    pub fn path(&self) -> PathBuf {
        self.dir.join(format!("{:016x}.probe", checksum(self.key.as_bytes())))
    }

    /// What is known; nothing where there is no file that can be trusted.
    pub fn load(&self) -> Verdicts {
        match self.read() {
            Ok(Some(verdicts)) => verdicts,
            Ok(None) => Verdicts::default(),
            Err(why) => {
                log!(Info, "{} is not used: {why}", self.path().display());
                Verdicts::default()
            }
        }
    }

    fn read(&self) -> std::result::Result<Option<Verdicts>, String> {
        let path = self.path();
        if !self.dir_is_ours().map_err(|e| e.to_string())? {
            return Ok(None);
        }
        let opened = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(path);
        let mut file = match opened {
            Ok(file) => file,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e.to_string()),
        };
        let meta = file.metadata().map_err(|e| e.to_string())?;
        if !meta.is_file() || meta.len() > MOST_BYTES {
            return Err("it is no file of this library".into());
        }
        owned_by_us(&meta)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(|e| e.to_string())?;
        let (head, payload) = bytes.split_at_checked(16).ok_or("it is cut short")?;
        if head[..8] != MAGIC || head[8..] != checksum(payload).to_le_bytes() {
            return Err("it is damaged, or of another version".into());
        }
        let (key, verdicts): (String, Verdicts) =
            postcard::from_bytes(payload).map_err(|e| format!("it cannot be decoded: {e}"))?;
        if key != self.key {
            return Err(format!("it is about something else: {key}"));
        }
        Ok(Some(verdicts))
    }

    /// Replaces the file.
    pub fn store(&self, verdicts: &Verdicts) -> Result<()> {
        let io = |what: String| move |e: std::io::Error| Error::os(what, &e);
        let dir = self.dir.display();
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&self.dir);
        made.map_err(io(format!("mkdir({dir})")))?;
        self.dir_is_ours()?;
        let payload = postcard::to_stdvec(&(&self.key, verdicts))
            .map_err(|e| Error::Internal(format!("a verdict cannot be encoded: {e}")))?;
        let mut drawn = [0u8; 8];
        random(&mut drawn)?;
        let name = format!("{}.{:016x}.new", std::process::id(), u64::from_le_bytes(drawn));
        let temporary = self.dir.join(name);
        let written = (|| {
            let mut file =
                OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
            file.write_all(&MAGIC)?;
            file.write_all(&checksum(&payload).to_le_bytes())?;
            file.write_all(&payload)?;
            file.sync_data()?;
            std::fs::rename(&temporary, self.path())
        })();
        written.map_err(|e| {
            let _ = std::fs::remove_file(&temporary);
            Error::os(format!("writing a verdict into {dir}"), &e)
        })
    }

    /// Whether the directory is there. One that others can write to could be handed a file, or a link in place of it.
    fn dir_is_ours(&self) -> Result<bool> {
        let flags = libc::O_DIRECTORY | libc::O_NOFOLLOW;
        let opened = OpenOptions::new().read(true).custom_flags(flags).open(&self.dir);
        let dir: File = match opened {
            Ok(dir) => dir,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(false),
            Err(e) => return Err(Error::os(format!("open({})", self.dir.display()), &e)),
        };
        let meta = dir.metadata().map_err(|e| Error::os("fstat(cache)", &e))?;
        owned_by_us(&meta).map(|()| true).map_err(|why| {
            Error::InvalidArgument(format!(
                "the cache directory {}: {why}; set PEERLANE_CACHE_DIR to a directory of your own",
                self.dir.display()
            ))
        })
    }
}

fn owned_by_us(meta: &std::fs::Metadata) -> std::result::Result<(), String> {
    // SAFETY: geteuid has no preconditions.
    let uid = unsafe { libc::geteuid() };
    if meta.uid() != uid {
        return Err(format!("it belongs to uid {}, not {uid}", meta.uid()));
    }
    if meta.mode() & 0o022 != 0 {
        return Err(format!("others can write to it (mode {:04o})", meta.mode() & 0o7777));
    }
    Ok(())
}

/// FNV-1a: enough to notice damage. Whoever can write here as this user needs no forgery.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::super::verdict::LaneVerdict;
    use super::*;
    use std::os::unix::fs::{symlink, PermissionsExt};

    fn scratch(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("pl-cache-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        dir
    }

    fn verdicts() -> Verdicts {
        let mut verdicts = Verdicts::default();
        verdicts.set("vmm", LaneVerdict::broken("nothing arrived".into()));
        verdicts
    }

    #[test]
    fn what_is_stored_is_found_again_and_replaced_as_a_whole() {
        let dir = scratch("again");
        let cache = Cache::new(&dir.join("deep"), "a box".into());
        assert_eq!(cache.load(), Verdicts::default());
        let verdicts = verdicts();
        cache.store(&verdicts).unwrap();
        assert_eq!(cache.load(), verdicts);
        cache.store(&Verdicts::default()).unwrap();
        assert_eq!(cache.load(), Verdicts::default());
        let left: Vec<_> = std::fs::read_dir(dir.join("deep")).unwrap().collect();
        assert_eq!(left.len(), 1, "{left:?}");
        std::fs::remove_dir_all(dir).unwrap();
    }

    /// Each of these would be believed without the check it is for: the first line shows that the file itself is good.
    #[test]
    fn what_cannot_be_trusted_is_not_there() {
        let dir = scratch("trust");
        let cache = Cache::new(&dir, "a box".into());
        let path = cache.path();
        // A verdict carries the second in which it was found: the same one is stored and expected.
        let verdicts = verdicts();
        let distrusted = |what: &str, spoil: &dyn Fn(&[u8])| {
            let _ = std::fs::remove_file(&path);
            cache.store(&verdicts).unwrap();
            assert_eq!(cache.load(), verdicts);
            spoil(&std::fs::read(&path).unwrap());
            assert_eq!(cache.load(), Verdicts::default(), "{what}");
        };
        let good = {
            cache.store(&verdicts).unwrap();
            std::fs::read(&path).unwrap()
        };
        for cut in [0, 7, 15, 16, good.len() - 1] {
            distrusted("cut short", &|bytes| std::fs::write(&path, &bytes[..cut]).unwrap());
        }
        for at in 0..good.len() {
            distrusted("a changed byte", &|bytes| {
                let mut bytes = bytes.to_vec();
                bytes[at] ^= 0x20;
                std::fs::write(&path, bytes).unwrap();
            });
        }
        distrusted("open to others", &|_| {
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o666)).unwrap();
        });
        distrusted("a link", &|_| {
            std::fs::rename(&path, dir.join("elsewhere")).unwrap();
            symlink(dir.join("elsewhere"), &path).unwrap();
        });
        distrusted("of another key", &|_| {
            let other = Cache::new(&dir, "another box".into());
            other.store(&verdicts).unwrap();
            std::fs::rename(other.path(), &path).unwrap();
        });
        // SAFETY: geteuid has no preconditions.
        if unsafe { libc::geteuid() } == 0 {
            distrusted("somebody else's", &|_| {
                std::os::unix::fs::chown(&path, Some(12345), None).unwrap();
            });
        }
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_directory_that_others_can_write_to_is_not_used() {
        let dir = scratch("open");
        let cache = Cache::new(&dir, "a box".into());
        cache.store(&verdicts()).unwrap();
        std::fs::set_permissions(&dir, PermissionsExt::from_mode(0o777)).unwrap();
        assert_eq!(cache.load(), Verdicts::default());
        let error = cache.store(&verdicts()).unwrap_err().to_string();
        assert!(error.contains("PEERLANE_CACHE_DIR"), "{error}");
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn the_variable_comes_before_the_cache_directory_before_home() {
        let mut env = Env::default();
        assert_eq!(default_dir(&env), None);
        env.home = Some("/home/me".into());
        assert_eq!(default_dir(&env), Some("/home/me/.cache/peerlane".into()));
        env.xdg_cache_home = Some("relative".into());
        assert_eq!(default_dir(&env), Some("/home/me/.cache/peerlane".into()));
        env.xdg_cache_home = Some("/caches".into());
        assert_eq!(default_dir(&env), Some("/caches/peerlane".into()));
        env.cache_dir = Some("/else".into());
        assert_eq!(default_dir(&env), Some("/else".into()));
    }
}
