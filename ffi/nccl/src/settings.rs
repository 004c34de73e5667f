//! What the environment asks for, read once.

use peerlane_core::comm::Config;
use peerlane_core::env::{Env, ServedBytes};
use std::sync::OnceLock;

/// The variables that matter here.
pub struct Settings {
    /// Forward everything.
    pub disabled: bool,
    /// Up to how many bytes calls are served.
    pub served: ServedBytes,
    /// The environment, or what is wrong with it.
    pub env: Result<Env, String>,
}

/// Until a measured plan says otherwise: where the ring of NCCL catches up on boxes without NVLink.
fn default_bytes() -> ServedBytes {
    ServedBytes::new(vec![(2, 1 << 20), (5, 512 << 10), (9, 256 << 10)])
}

/// The settings of this process.
pub fn get() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(|| {
        let env = Env::read().map_err(|error| error.to_string());
        // The log's level is set on the way.
        let usable = env
            .as_ref()
            .is_ok_and(|env| Config::from_vars(1, env).is_ok() || env.islands.is_some());
        if !usable {
            if let Err(error) = &env {
                crate::log!(Warn, "NCCL serves every call: {error}");
            }
        }
        Settings {
            disabled: env.as_ref().map_or(true, |env| env.disable == Some(true)),
            served: env
                .as_ref()
                .ok()
                .and_then(|env| env.nccl_bytes.clone())
                .unwrap_or_else(default_bytes),
            env,
        }
    })
}
