//! The structs that cross by pointer and begin with their size, so that they can grow.
//!
//! A program may be older than the library (its struct is shorter: missing fields are "not set") or newer (its struct is
//! longer: what this library does not know must not be set).

use crate::arguments::{enumerator, null, Argument};
use crate::status::{Failure, Outcome};
use peerlane_core::comm::{Config, Stats};
use peerlane_core::schedule::Islands;
use peerlane_core::{Algorithm, Device, Direction, Error, Lane, Protocol};
use std::ffi::{c_char, CStr, OsStr};
use std::mem::{offset_of, size_of};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

/// No struct of any version is longer; a larger `size` was never set.
const MAX_SIZE: usize = 4096;

/// `peerlane_config` of the header.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct RawConfig {
    size: usize,
    islands: *const c_char,
    slab_bytes: u64,
    deadline_seconds: f64,
    setup_deadline_seconds: f64,
    algorithm: i32,
    protocol: i32,
    direction: i32,
    check: i32,
    run_dir: *const c_char,
    device: i32,
    device_ordinal: i32,
    lane: i32,
    reserved: i32,
}

impl RawConfig {
    const UNSET: RawConfig = RawConfig {
        size: size_of::<RawConfig>(),
        islands: std::ptr::null(),
        slab_bytes: 0,
        deadline_seconds: 0.0,
        setup_deadline_seconds: 0.0,
        algorithm: -1,
        protocol: -1,
        direction: -1,
        check: -1,
        run_dir: std::ptr::null(),
        device: -1,
        device_ordinal: -1,
        lane: -1,
        reserved: 0,
    };
    /// Bytes of the first version of the struct.
    const FIRST: usize = offset_of!(RawConfig, run_dir) + size_of::<*const c_char>();
}

/// A config whose fields are to be "not set".
pub struct ConfigOut(*mut u8);

impl Argument for ConfigOut {
    type Raw = *mut RawConfig;
    unsafe fn check(raw: *mut RawConfig, name: &'static str) -> Outcome<Self> {
        if raw.is_null() {
            return Err(null(name));
        }
        Ok(ConfigOut(raw.cast()))
    }
}

impl ConfigOut {
    /// Writes `size` bytes: the fields that both sides know, and zeros ("not set") behind them.
    ///
    /// # Safety
    /// The caller's struct has `size` bytes.
    pub unsafe fn init(self, size: usize) -> Outcome<()> {
        check_size("size", size, RawConfig::FIRST, "pass sizeof(peerlane_config)")?;
        let unset = RawConfig { size, ..RawConfig::UNSET };
        let known = size.min(size_of::<RawConfig>());
        // SAFETY: `size` bytes are writable, `known` of them are copied from a struct at least as long.
        unsafe {
            self.0.write_bytes(0, size);
            self.0.copy_from_nonoverlapping((&raw const unset).cast(), known);
        }
        Ok(())
    }
}

/// A config as the caller filled it, `None` for NULL. Texts are copied: a creation in a group outlives them.
pub struct ConfigIn(Option<Fields>);

struct Fields {
    raw: RawConfig,
    islands: Option<String>,
    run_dir: Option<PathBuf>,
}

impl Argument for ConfigIn {
    type Raw = *const RawConfig;
    unsafe fn check(raw: *const RawConfig, name: &'static str) -> Outcome<Self> {
        if raw.is_null() {
            return Ok(ConfigIn(None));
        }
        let (first, remedy) =
            (RawConfig::FIRST, "call peerlane_config_init before filling the struct");
        // SAFETY: the caller's promise, and every bit pattern is a value of the fields' types.
        let fields = unsafe { read_struct(raw, name, first, remedy, RawConfig::UNSET) }?;
        // SAFETY: texts are NULL or end with a 0, says the header.
        let text = |p: *const c_char| (!p.is_null()).then(|| unsafe { CStr::from_ptr(p) });
        let islands = text(fields.islands)
            .map(|t| t.to_str().map(str::to_owned))
            .transpose()
            .map_err(|_| Failure::argument(format!("'{name}->islands' is not UTF-8 text")))?;
        let run_dir = text(fields.run_dir).map(|t| OsStr::from_bytes(t.to_bytes()).into());
        Ok(ConfigIn(Some(Fields { raw: fields, islands, run_dir })))
    }
}

impl ConfigIn {
    /// The configuration for `n` ranks: the environment's, overridden by what the caller set.
    pub fn resolve(self, n: usize) -> Outcome<Config> {
        let mut config = Config::from_env(n)?;
        let Some(Fields { raw, islands, run_dir }) = self.0 else { return Ok(config) };
        if let Some(text) = islands {
            config.islands = Some(Islands::parse(n, &text)?);
        }
        if raw.slab_bytes != 0 {
            config.slab_bytes = Some(raw.slab_bytes);
        }
        set(&mut config.deadline, seconds(raw.deadline_seconds, "config->deadline_seconds")?);
        set(
            &mut config.setup_deadline,
            seconds(raw.setup_deadline_seconds, "config->setup_deadline_seconds")?,
        );
        let pin = |raw: i32| (raw != -1).then_some(raw);
        if let Some(raw) = pin(raw.algorithm) {
            config.algorithm = Some(enumerator(raw, "config->algorithm", Algorithm::from_raw)?);
        }
        if let Some(raw) = pin(raw.protocol) {
            config.protocol = Some(enumerator(raw, "config->protocol", Protocol::from_raw)?);
        }
        if let Some(raw) = pin(raw.direction) {
            config.direction = Some(enumerator(raw, "config->direction", Direction::from_raw)?);
        }
        match raw.check {
            -1 => {}
            0 | 1 => config.check = raw.check == 1,
            other => {
                return Err(Failure::argument(format!(
                    "'config->check' is {other}; 0 is off, 1 is on, -1 leaves it to PEERLANE_CHECK"
                )))
            }
        }
        match raw.device {
            -1 => {}
            0 => config.device = Device::Cpu,
            1 => {
                let ordinal = match raw.device_ordinal {
                    -1 => None,
                    n => Some(u32::try_from(n).map_err(|_| {
                        Failure::argument(format!(
                            "'config->device_ordinal' is {n}; pass a GPU's number, or -1 for that of the current context"
                        ))
                    })?),
                };
                config.device = Device::Cuda { ordinal };
            }
            other => {
                return Err(Failure::argument(format!(
                    "'config->device' is {other}; it takes PEERLANE_CPU, PEERLANE_CUDA, or -1 for PEERLANE_DEVICE"
                )))
            }
        }
        if let Some(raw) = pin(raw.lane) {
            config.lane = enumerator(raw, "config->lane", Lane::from_raw)?;
        }
        if raw.reserved != 0 {
            return Err(Failure::argument("'config->reserved' is not 0".to_owned()));
        }
        if run_dir.is_some() {
            config.run_dir = run_dir;
        }
        Ok(config)
    }
}

fn set<T>(field: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *field = value;
    }
}

fn seconds(value: f64, name: &str) -> Outcome<Option<Duration>> {
    match value {
        0.0 => Ok(None),
        v if v > 0.0 && v <= 1e9 => Ok(Some(Duration::from_secs_f64(v))),
        v => Err(Failure::argument(format!(
            "'{name}' is {v}; pass seconds above 0 (at most 1e9), or 0 for the default"
        ))),
    }
}

/// `peerlane_stats` of the header.
#[repr(C)]
pub struct RawStats {
    size: usize,
    calls: u64,
    steps: u64,
    bytes: u64,
    failed: u64,
    tree_hash: u64,
    by_algorithm: [u64; 16],
    by_protocol: [u64; 8],
}

impl RawStats {
    /// Bytes of the first version of the struct.
    const FIRST: usize = offset_of!(RawStats, by_protocol) + size_of::<[u64; 8]>();
}

/// Where statistics go.
pub struct StatsOut {
    at: *mut u8,
    size: usize,
}

impl Argument for StatsOut {
    type Raw = *mut RawStats;
    unsafe fn check(raw: *mut RawStats, name: &'static str) -> Outcome<Self> {
        if raw.is_null() {
            return Err(null(name));
        }
        // SAFETY: every version begins with its size.
        let size = unsafe { raw.cast::<usize>().read_unaligned() };
        check_size(
            &format!("{name}->size"),
            size,
            RawStats::FIRST,
            "set it to sizeof(peerlane_stats) before the call",
        )?;
        Ok(StatsOut { at: raw.cast(), size })
    }
}

impl StatsOut {
    /// Writes the fields that both sides know, and zeros behind them.
    pub fn write(self, stats: &Stats) {
        let mut raw = RawStats {
            size: self.size,
            calls: stats.calls,
            steps: stats.steps,
            bytes: stats.bytes,
            failed: stats.failed,
            tree_hash: stats.tree_hash,
            by_algorithm: [0; 16],
            by_protocol: [0; 8],
        };
        for (to, from) in raw.by_algorithm.iter_mut().zip(stats.by_algorithm) {
            *to = from;
        }
        for (to, from) in raw.by_protocol.iter_mut().zip(stats.by_protocol) {
            *to = from;
        }
        // SAFETY: the caller's struct has `size` bytes; as many of ours are copied as both have.
        unsafe {
            self.at.write_bytes(0, self.size);
            self.at.copy_from_nonoverlapping(
                (&raw const raw).cast(),
                self.size.min(size_of::<RawStats>()),
            );
        }
    }
}

/// A struct that begins with its size, as the caller filled it; what an older program does not know of it is as in `unset`.
/// `first` are the bytes of its first version.
///
/// # Safety
/// `raw` points to a struct as long as its first field says, and every bit pattern is a `T`.
pub(crate) unsafe fn read_struct<T: Copy>(
    raw: *const T,
    name: &str,
    first: usize,
    remedy: &str,
    unset: T,
) -> Outcome<T> {
    let bytes = raw.cast::<u8>();
    // SAFETY: every version begins with its size.
    let size = unsafe { bytes.cast::<usize>().read_unaligned() };
    check_size(&format!("{name}->size"), size, first, remedy)?;
    let known = size_of::<T>();
    for at in known..size {
        // SAFETY: the caller's struct has `size` bytes.
        if unsafe { bytes.add(at).read() } != 0 {
            return Err(Error::Unsupported(format!(
                "'{name}' sets a field at byte {at}, but this library knows {known} bytes; update the library or leave the \
                 field unset"
            ))
            .into());
        }
    }
    let mut fields = unset;
    // SAFETY: both have as many bytes, and the caller vouches for the type.
    unsafe { (&raw mut fields).cast::<u8>().copy_from_nonoverlapping(bytes, size.min(known)) };
    Ok(fields)
}

fn check_size(name: &str, size: usize, first: usize, remedy: &str) -> Outcome<()> {
    if (first..=MAX_SIZE).contains(&size) {
        return Ok(());
    }
    Err(Failure::argument(format!("'{name}' is {size}, which is no size of the struct; {remedy}")))
}

/// The caller's text buffer.
pub struct TextOut(*mut u8);

impl Argument for TextOut {
    type Raw = *mut c_char;
    unsafe fn check(raw: *mut c_char, _name: &'static str) -> Outcome<Self> {
        Ok(TextOut(raw.cast()))
    }
}

impl TextOut {
    /// Refuses NULL with a capacity.
    pub fn check_capacity(&self, capacity: usize) -> Outcome<()> {
        if self.0.is_null() && capacity != 0 {
            return Err(Failure::argument(format!(
                "'buffer' is NULL but 'capacity' is {capacity}; pass a buffer, or 0 to ask for the length"
            )));
        }
        Ok(())
    }

    /// Writes as much of `text` as fits before the closing 0, cut at a whole character.
    ///
    /// # Safety
    /// The caller's buffer has `capacity` bytes; [`TextOut::check_capacity`] passed.
    pub unsafe fn write(self, text: &str, capacity: usize) {
        let Some(room) = capacity.checked_sub(1) else { return };
        let fits = (0..=room.min(text.len())).rev().find(|&at| text.is_char_boundary(at));
        let fits = fits.unwrap_or(0);
        // SAFETY: `fits` is at most `capacity - 1` and at most the text's length; the two do not overlap, since the text
        // is ours.
        unsafe {
            self.0.copy_from_nonoverlapping(text.as_ptr(), fits);
            self.0.add(fits).write(0);
        }
    }
}

#[cfg(test)]
#[path = "structs_test.rs"]
mod tests;
