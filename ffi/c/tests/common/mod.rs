//! What the tests share: where the library and the sources are, and how a C client is built and run.
#![allow(dead_code, missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// The repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// A file of the repository as text.
pub fn text(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// The shared object, built now. `cargo test` builds no cdylib for integration tests: what lies in the target directory may be
/// of another day. Its build lock is free again when tests run, so cargo can be called here.
pub fn library() -> PathBuf {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(build_library).clone()
}

fn build_library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    // <target>/<profile directory>/deps/<test>
    let profile_dir = test.ancestors().nth(2).unwrap();
    // What `cargo test` built the library with, so that nothing but the cdylib is left to do. Of a whole workspace's tests
    // the features are those of `make test`, joined over all its packages.
    let profile = if profile_dir.ends_with("release") { "release" } else { "test" };
    let makefile = text("Makefile");
    let tested = makefile.lines().find_map(|line| line.strip_prefix("TESTED := ")).unwrap();
    let what: &[&str] = match cfg!(feature = "cuda") {
        true => &["--workspace", "--features", tested],
        false => &["--package", "peerlane-c"],
    };
    let output = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--lib", "--profile", profile])
        .args(what)
        .args(["--message-format", "json-render-diagnostics", "--target-dir"])
        .arg(profile_dir.parent().unwrap())
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let messages = String::from_utf8(output.stdout).unwrap();
    let mut quoted = messages.split('"').filter(|text| text.ends_with("/libpeerlane.so"));
    let path = PathBuf::from(quoted.next_back().expect("cargo names what it built"));
    assert!(path.is_file(), "{} is not there", path.display());
    path
}

/// The exported functions, as data.
pub fn export_list() -> Vec<String> {
    text("ffi/c/exports.txt").lines().map(str::to_owned).collect()
}

/// A directory to build and run in, with the library under the names that the linker and the loader look for, and an
/// empty run directory.
pub struct Bench {
    dir: tempfile::TempDir,
}

impl Bench {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for name in ["libpeerlane.so", "libpeerlane.so.0"] {
            symlink(library(), dir.path().join(name)).unwrap();
        }
        std::fs::create_dir(dir.path().join("run")).unwrap();
        let private = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        std::fs::set_permissions(dir.path().join("run"), private).unwrap();
        Bench { dir }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Compiles a program of the repository against the public header and the library, warnings being errors.
    pub fn compile(&self, source: &str, flags: &[&str]) -> PathBuf {
        let program = self.path().join("program");
        let output = Command::new(std::env::var_os("CC").unwrap_or("cc".into()))
            .args(["-std=gnu99", "-g", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror"])
            .args(flags)
            .arg("-I")
            .arg(root().join("include"))
            .arg(root().join(source))
            .arg("-o")
            .arg(&program)
            .arg("-L")
            .arg(self.path())
            .arg(format!("-Wl,-rpath,{}", self.path().display()))
            .args(["-lpeerlane", "-lpthread", "-ldl", "-lm"])
            .output()
            .expect("a C compiler called cc, or what CC names");
        assert!(output.status.success(), "{source}: {}", String::from_utf8_lossy(&output.stderr));
        program
    }

    /// Runs a command to its end and returns what it printed; panics if it fails or takes longer than `limit`. What it
    /// forked ends with it.
    pub fn run(&self, command: &mut Command, limit: Duration) -> String {
        let output = self.outcome(command, limit);
        let printed = printed(&output);
        assert!(output.status.success(), "{command:?} ended with {}:\n{printed}", output.status);
        let left: Vec<_> = std::fs::read_dir(self.path().join("run")).unwrap().flatten().collect();
        assert!(left.is_empty(), "{command:?} left {left:?} in its run directory");
        printed
    }

    fn outcome(&self, command: &mut Command, limit: Duration) -> Output {
        let files = ["stdout", "stderr"].map(|name| self.path().join(name));
        let [stdout, stderr] = files.each_ref().map(|path| std::fs::File::create(path).unwrap());
        let mut child = command
            .env("PEERLANE_RUN_DIR", self.path().join("run"))
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(stderr)
            .process_group(0)
            .spawn()
            .unwrap_or_else(|e| panic!("{command:?}: {e}"));
        let start = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break Some(status);
            }
            if start.elapsed() > limit {
                break None;
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        // SAFETY: a plain system call; the group is the one that was made for this child.
        unsafe { libc::kill(-(child.id() as i32), libc::SIGKILL) };
        let read = |path: &PathBuf| std::fs::read(path).unwrap();
        let Some(status) = status else {
            let _ = child.wait();
            let (out, err) = (read(&files[0]), read(&files[1]));
            panic!(
                "{command:?} did not end within {limit:?}:\n{}{}",
                String::from_utf8_lossy(&out),
                String::from_utf8_lossy(&err)
            );
        };
        Output { status, stdout: read(&files[0]), stderr: read(&files[1]) }
    }
}

fn printed(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}
