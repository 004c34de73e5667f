//! What the ranks of a communicator to be must know to find each other.

use super::run_dir::{default_dir, effective_uid, RunDir};
use crate::env::Env;
use crate::error::{Error, Result};
use std::ffi::OsStr;
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Bytes of a unique id, as in NCCL.
pub const UNIQUE_ID_BYTES: usize = 128;

// The layout, little-endian. The directory travels in the id, so that ranks with different environments still meet.
const MAGIC: &[u8; 8] = b"peerlane";
const VERSION: u8 = 1;
const AT_VERSION: usize = 8;
const AT_DIR_LEN: usize = 9;
const AT_UID: usize = 12;
const AT_TOKEN: usize = 16;
const AT_NAME: usize = 32;
const AT_CHECK: usize = 40;
const AT_DIR: usize = 48;
/// Longest run directory: with it the socket's path, 20 bytes longer, fits the 107 bytes of a socket address.
const MAX_DIR: usize = UNIQUE_ID_BYTES - AT_DIR;

/// Names a communicator to be: made once, handed to every rank by whatever means the caller has.
///
/// It holds the run directory, the name of the socket in it and the 128-bit token that admits a rank, so whoever reads
/// it and runs as the same user can join: hand it on like a password. Each one serves one communicator; after a
/// failed creation make a new one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId {
    bytes: [u8; UNIQUE_ID_BYTES],
}

impl UniqueId {
    /// A new id whose ranks meet in the default run directory: `PEERLANE_RUN_DIR`, else `$XDG_RUNTIME_DIR/peerlane`, else
    /// `/tmp/peerlane-UID`.
    ///
    /// # Errors
    /// The directory cannot be made, belongs to another user, is open to others, or its path exceeds 80 bytes.
    pub fn new() -> Result<Self> {
        Self::in_dir(None)
    }

    /// The same in the given run directory; its parent must exist.
    pub fn in_dir(run_dir: Option<&Path>) -> Result<Self> {
        let dir = match run_dir {
            Some(dir) => dir.to_path_buf(),
            None => default_dir(&Env::read()?),
        };
        let dir = std::path::absolute(&dir).map_err(|e| Error::os("getcwd", &e))?;
        let path = dir.as_os_str().as_bytes();
        if path.len() > MAX_DIR {
            return Err(Error::InvalidArgument(format!(
                "the run directory {} is {} bytes long, at most {MAX_DIR} fit a unique id and a \
                 socket address: set PEERLANE_RUN_DIR to a shorter one",
                dir.display(),
                path.len()
            )));
        }
        RunDir::create(&dir)?;
        let mut bytes = [0; UNIQUE_ID_BYTES];
        bytes[..MAGIC.len()].copy_from_slice(MAGIC);
        bytes[AT_VERSION] = VERSION;
        bytes[AT_DIR_LEN] = path.len() as u8;
        bytes[AT_UID..AT_TOKEN].copy_from_slice(&effective_uid().to_le_bytes());
        // The name is drawn apart from the token: names of bound sockets are public in /proc/net/unix.
        random(&mut bytes[AT_TOKEN..AT_CHECK])?;
        bytes[AT_DIR..AT_DIR + path.len()].copy_from_slice(path);
        let check = checksum(&bytes);
        bytes[AT_CHECK..AT_DIR].copy_from_slice(&check);
        Ok(UniqueId { bytes })
    }

    /// An id that another process made.
    ///
    /// # Errors
    /// The bytes are not an id, or of another version of the format, or were damaged on the way.
    pub fn from_bytes(bytes: [u8; UNIQUE_ID_BYTES]) -> Result<Self> {
        let refuse = |why: &str| Err(Error::InvalidArgument(format!("unique id: {why}")));
        if bytes.iter().all(|&b| b == 0) {
            return refuse("all bytes are zero; it was never filled in or never reached this rank");
        }
        if &bytes[..MAGIC.len()] != MAGIC {
            return refuse("it does not begin with 'peerlane'; is it another library's?");
        }
        if bytes[AT_VERSION] != VERSION {
            return refuse(&format!(
                "it has format version {}, this library reads {VERSION}; use the same peerlane \
                 version on all ranks",
                bytes[AT_VERSION]
            ));
        }
        if bytes[AT_CHECK..AT_DIR] != checksum(&bytes) {
            return refuse("its checksum is wrong; all 128 bytes must be handed on unchanged");
        }
        let len = bytes[AT_DIR_LEN] as usize;
        if !(1..=MAX_DIR).contains(&len)
            || bytes[AT_DIR] != b'/'
            || bytes[AT_DIR..AT_DIR + len].contains(&0)
        {
            return refuse("its run directory is no absolute path");
        }
        Ok(UniqueId { bytes })
    }

    /// The bytes to hand on.
    pub fn as_bytes(&self) -> &[u8; UNIQUE_ID_BYTES] {
        &self.bytes
    }

    /// Effective user of the process that made it.
    pub(super) fn uid(&self) -> u32 {
        let mut uid = [0; 4];
        uid.copy_from_slice(&self.bytes[AT_UID..AT_TOKEN]);
        u32::from_le_bytes(uid)
    }

    pub(super) fn token(&self) -> &[u8] {
        &self.bytes[AT_TOKEN..AT_NAME]
    }

    /// The directory that its ranks meet in.
    pub fn run_dir(&self) -> &Path {
        let len = self.bytes[AT_DIR_LEN] as usize;
        Path::new(OsStr::from_bytes(&self.bytes[AT_DIR..AT_DIR + len]))
    }

    pub(super) fn socket_name(&self) -> String {
        format!("pl-{}", hex(&self.bytes[AT_NAME..AT_CHECK]))
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// FNV-1a over everything but itself: finds damage in transit, is no protection against forgery (the token is).
fn checksum(bytes: &[u8; UNIQUE_ID_BYTES]) -> [u8; 8] {
    let covered = bytes[..AT_CHECK].iter().chain(&bytes[AT_DIR..]);
    covered
        .fold(0xcbf2_9ce4_8422_2325_u64, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
        .to_le_bytes()
}

/// Fills `bytes` from the system's generator.
pub(crate) fn random(bytes: &mut [u8]) -> Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        let rest = &mut bytes[filled..];
        // SAFETY: `rest` is writable for its length.
        let got = unsafe { libc::getrandom(rest.as_mut_ptr().cast(), rest.len(), 0) };
        if got >= 0 {
            filled += got as usize;
        } else if std::io::Error::last_os_error().kind() != std::io::ErrorKind::Interrupted {
            return Err(Error::last_os("getrandom"));
        }
    }
    Ok(())
}

impl std::fmt::Debug for UniqueId {
    /// Without the token: debug output ends up in logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "UniqueId({})", self.run_dir().join(self.socket_name()).display())
    }
}

impl std::fmt::Display for UniqueId {
    /// 256 hexadecimal digits.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&hex(&self.bytes))
    }
}

impl std::str::FromStr for UniqueId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let digits = text.trim().as_bytes();
        if digits.len() != 2 * UNIQUE_ID_BYTES {
            return Err(Error::InvalidArgument(format!(
                "unique id: {} characters, expected {} hexadecimal digits",
                digits.len(),
                2 * UNIQUE_ID_BYTES
            )));
        }
        let mut bytes = [0; UNIQUE_ID_BYTES];
        for (i, pair) in digits.chunks_exact(2).enumerate() {
            let value = |c: u8| (c as char).to_digit(16);
            match (value(pair[0]), value(pair[1])) {
                (Some(high), Some(low)) => bytes[i] = (high << 4 | low) as u8,
                _ => {
                    return Err(Error::InvalidArgument(format!(
                        "unique id: character {} or {} is no hexadecimal digit",
                        2 * i + 1,
                        2 * i + 2
                    )))
                }
            }
        }
        Self::from_bytes(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn id() -> UniqueId {
        UniqueId::in_dir(Some(&std::env::temp_dir().join("pl-unit-id"))).unwrap()
    }

    #[test]
    fn an_id_survives_bytes_and_text() {
        let id = id();
        assert_eq!(UniqueId::from_bytes(*id.as_bytes()).unwrap(), id);
        let text = id.to_string();
        assert_eq!(text.len(), 256);
        assert_eq!(text.parse::<UniqueId>().unwrap(), id);
        assert_eq!(id.run_dir(), std::env::temp_dir().join("pl-unit-id"));
    }

    #[test]
    fn no_two_ids_are_alike_and_debug_hides_the_token() {
        let (a, b) = (id(), id());
        assert_ne!(a.token(), b.token());
        assert_ne!(a.socket_name(), b.socket_name());
        let debug = format!("{a:?}");
        assert!(debug.contains(&a.socket_name()) && !debug.contains(&hex(a.token())));
    }

    #[test]
    fn what_is_wrong_with_an_id_is_said() {
        let good = *id().as_bytes();
        let said = |change: &dyn Fn(&mut [u8; UNIQUE_ID_BYTES])| {
            let mut bytes = good;
            change(&mut bytes);
            UniqueId::from_bytes(bytes).unwrap_err().to_string()
        };
        assert!(said(&|b| *b = [0; UNIQUE_ID_BYTES]).contains("zero"));
        assert!(said(&|b| b[0] = b'x').contains("another library"));
        assert!(said(&|b| b[AT_VERSION] = 9).contains("version 9"));
        assert!(said(&|b| b[AT_TOKEN] ^= 1).contains("checksum"));
        assert!("abc".parse::<UniqueId>().unwrap_err().to_string().contains("3 characters"));
        assert!("g"
            .repeat(256)
            .parse::<UniqueId>()
            .unwrap_err()
            .to_string()
            .contains("character 1"));
    }

    #[test]
    fn a_directory_too_long_for_a_socket_address_is_refused() {
        let dir = std::env::temp_dir().join("d".repeat(90));
        let error = UniqueId::in_dir(Some(&dir)).unwrap_err().to_string();
        assert!(error.contains("at most 80") && error.contains("PEERLANE_RUN_DIR"), "{error}");
        assert!(!dir.exists());
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_an_id(bytes in prop::collection::vec(any::<u8>(), UNIQUE_ID_BYTES), fix in any::<bool>()) {
            let mut raw = [0; UNIQUE_ID_BYTES];
            raw.copy_from_slice(&bytes);
            if fix {
                raw[..8].copy_from_slice(MAGIC);
                raw[AT_VERSION] = VERSION;
                let check = checksum(&raw);
                raw[AT_CHECK..AT_DIR].copy_from_slice(&check);
            }
            if let Ok(id) = UniqueId::from_bytes(raw) {
                prop_assert!(id.run_dir().is_absolute());
                prop_assert_eq!(id.to_string().parse::<UniqueId>().unwrap(), id);
            }
        }

        #[test]
        fn one_flipped_bit_is_noticed(at in 0..UNIQUE_ID_BYTES, bit in 0..8) {
            let mut bytes = *id().as_bytes();
            bytes[at] ^= 1_u8 << bit;
            prop_assert!(UniqueId::from_bytes(bytes).is_err());
        }
    }
}
