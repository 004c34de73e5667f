//! Values of the environment, one a line: refused by an error that names a variable, or a configuration comes of them.
#![no_main]

use libfuzzer_sys::fuzz_target;
use peerlane::comm::Config;
use peerlane::env::Env;

const NAMES: [&str; 11] = [
    "ISLANDS",
    "SLAB",
    "DEADLINE",
    "SETUP_DEADLINE",
    "ALGO",
    "PROTO",
    "DIRECTION",
    "CHECK",
    "DEVICE",
    "LANE",
    "LOG",
];

fuzz_target!(|data: &[u8]| {
    let text = String::from_utf8_lossy(data);
    let values: Vec<&str> = text.split('\n').collect();
    let lookup = |name: &str| {
        let at = NAMES.iter().position(|known| name == format!("PEERLANE_{known}"))?;
        values.get(at).map(|value| value.to_string())
    };
    match Env::from_lookup(lookup) {
        Ok(env) => drop(Config::from_vars(4, &env)),
        Err(error) => {
            let error = error.to_string();
            assert!(error.contains("PEERLANE_"), "{error}");
        }
    }
});
