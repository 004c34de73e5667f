//! What the environment asks for, read once.

use peerlane_core::comm::Config;
use peerlane_core::env::{Env, ServedBytes};
use std::sync::OnceLock;

/// The variables that matter here.
pub struct Settings {
    /// Forward everything.
    pub disabled: bool,
    /// Up to how many bytes calls are served, where the user says so.
    pub served: Option<ServedBytes>,
    /// The environment, or what is wrong with it.
    pub env: Result<Env, String>,
}

/// Where the box is not described, or the ranks share a GPU: about where NCCL's ring catches up on boxes without NVLink.
pub fn undescribed_bytes() -> ServedBytes {
    ServedBytes::new(vec![(2, 1 << 20), (5, 512 << 10), (9, 256 << 10)])
}

/// The settings of this process.
pub fn get() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(|| {
        let env = Env::read().map_err(|error| error.to_string());
        if let Ok(env) = &env {
            // Sets the log's level. What else is wrong with it for some number of ranks is found when there is one.
            let _ = Config::from_vars(1, env);
        }
        Settings {
            disabled: Env::is_disabled(),
            served: env.as_ref().ok().and_then(|env| env.nccl_bytes.clone()),
            env,
        }
    })
}
