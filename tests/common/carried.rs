//! The folder of a measuring script as it is carried to a machine with GPUs, over the stand-in driver.

use super::{gpu_tool, tool};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

fn program(path: &Path, text: &str) {
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// `scripts/SCRIPT` in a folder of this test's own, with a `peerlane` that finds a kernel to measure between without nvcc, and
/// a `gpu_smoke` that says `smoke`: a format of printf in single quotes.
pub fn folder(name: &str, script: &str, smoke: &str) -> PathBuf {
    let folder = tool::folder(name);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts").join(script);
    std::fs::copy(source, folder.join(script)).unwrap();
    let (real, fatbin) = (env!("CARGO_BIN_EXE_peerlane"), gpu_tool::fatbin().display());
    program(
        &folder.join("peerlane"),
        &format!(
            "#!/bin/sh\ncase \"$*\" in *--between*) set -- \"$@\" --foreign-kernel '{fatbin}';; esac\nexec '{real}' \"$@\"\n"
        ),
    );
    program(&folder.join("gpu_smoke"), &format!("#!/bin/sh\nprintf '{smoke}'\n"));
    folder
}
