//! Runs a test against the stand-in driver: in a process of its own, whose loader finds it as `libcuda.so.1`.

// Each test binary that includes this uses its own share of it.
#![allow(dead_code)]

use std::ffi::{c_void, CString};
use std::path::PathBuf;
use std::process::{Command, Stdio};

const CHILD: &str = "PEERLANE_TEST_CHILD";

/// A folder with the stand-in driver in it, under the names that programs look for.
pub fn driver_folder() -> PathBuf {
    let built = std::env::current_exe().unwrap().with_file_name("libfakecuda.so");
    assert!(built.exists(), "{} was not built with the tests", built.display());
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("fakecuda");
    std::fs::create_dir_all(&folder).unwrap();
    for name in ["libcuda.so", "libcuda.so.1"] {
        // Tests share the folder, and it stays for the next run.
        let _ = std::os::unix::fs::symlink(&built, folder.join(name));
    }
    folder
}

/// Runs `body` in a new process with `env`, in which this test `name` runs alone; its failure is the test's.
pub fn in_child(name: &str, env: &[(&str, &str)], body: fn()) {
    let folder = driver_folder();
    in_child_with(name, env, folder.to_str().unwrap(), body);
}

/// The same with a library path of the test's choice.
pub fn in_child_with(name: &str, env: &[(&str, &str)], library_path: &str, body: fn()) {
    if std::env::var(CHILD).is_ok_and(|child| child == name) {
        return body();
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture", "--test-threads=1"])
        .env(CHILD, name)
        .env("LD_LIBRARY_PATH", library_path)
        .envs(env.iter().copied())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    // A name that matches nothing would pass as well.
    assert!(output.status.success() && text.contains("1 passed"), "{text}\n{errors}");
}

fn symbol(name: &str) -> *mut c_void {
    let name = CString::new(name).unwrap();
    // SAFETY: opens the library that the driver layer has opened, and looks up an exported function.
    unsafe {
        let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
        assert!(!library.is_null());
        let found = libc::dlsym(library, name.as_ptr());
        assert!(!found.is_null(), "{name:?}");
        found
    }
}

type HostKernel = unsafe extern "C" fn(*const c_void);

fn register(name: &str, run: HostKernel, bytes: usize) {
    type Register = unsafe extern "C" fn(*const i8, HostKernel, usize) -> u32;
    let name = CString::new(name).unwrap();
    // SAFETY: the exported function's own type; the kernel is called with a pointer to a struct of `bytes` bytes.
    unsafe {
        let register: Register = std::mem::transmute(symbol("fakecuda_register_kernel"));
        assert_eq!(register(name.as_ptr(), run, bytes), 0);
    }
}

/// Makes a host function a kernel whose one parameter is an `A`.
pub fn register_kernel<A>(name: &str, run: unsafe extern "C" fn(*const A)) {
    // SAFETY: the kernel is called with a pointer to an `A`.
    let run = unsafe { std::mem::transmute::<unsafe extern "C" fn(*const A), HostKernel>(run) };
    register(name, run, size_of::<A>());
}

/// What stands for the library's kernels: see `hostkernels`.
pub fn register_host_kernels() {
    for kernel in hostkernels::kernels() {
        register(kernel.symbol, kernel.run, kernel.bytes);
    }
}

/// Replaces the rules of refusal, and counts calls from one again.
pub fn set_fail(rules: &str) {
    let rules = CString::new(rules).unwrap();
    // SAFETY: the exported function's own type.
    unsafe {
        let set: unsafe extern "C" fn(*const i8) = std::mem::transmute(symbol("fakecuda_set_fail"));
        set(rules.as_ptr());
    }
}

/// Names the rank that the calling thread is, for the rules.
pub fn set_rank(rank: usize) {
    // SAFETY: the exported function's own type.
    unsafe {
        let set: unsafe extern "C" fn(i32) = std::mem::transmute(symbol("fakecuda_set_rank"));
        set(rank as i32);
    }
}

/// How often a call was made since the last [`set_fail`].
pub fn calls(name: &str) -> u64 {
    let name = CString::new(name).unwrap();
    // SAFETY: the exported function's own type.
    unsafe {
        let calls: unsafe extern "C" fn(*const i8) -> u64 =
            std::mem::transmute(symbol("fakecuda_calls"));
        calls(name.as_ptr())
    }
}

/// What is alive: contexts, allocations, physical handles, reservations, mappings, opened handles, registrations, modules,
/// streams, events, graphs, executables, user objects.
pub fn live() -> [u64; 13] {
    let mut counts = [0; 13];
    // SAFETY: the exported function's own type.
    unsafe {
        let live: unsafe extern "C" fn(*mut [u64; 13]) =
            std::mem::transmute(symbol("fakecuda_live"));
        live(&mut counts);
    }
    counts
}

/// A node of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node {
    /// Whether it is a kernel of the library's that may take part in programmatic launches.
    pub ours: bool,
    /// It may start before the one before it has ended.
    pub early: bool,
    /// It lets the next one do so.
    pub lets: bool,
    /// How many nodes it comes after.
    pub after: u32,
    /// Blocks, and threads of each; none of what is no kernel.
    pub shape: (u32, u32),
    /// Blocks that start together; 0: none do.
    pub cluster: u32,
}

/// The nodes of the graph that this thread has last made launchable, in the order of their capture.
pub fn graph() -> Vec<Node> {
    let mut nodes = [[0u32; 7]; 64];
    // SAFETY: the exported function's own type, and an array of as many elements as said.
    let count = unsafe {
        let seen: unsafe extern "C" fn(*mut [u32; 7], usize) -> usize =
            std::mem::transmute(symbol("fakecuda_graph"));
        seen(nodes.as_mut_ptr(), nodes.len())
    };
    nodes[..count]
        .iter()
        .map(|&[kind, early, lets, after, blocks, threads, cluster]| Node {
            ours: kind == 2,
            early: early != 0,
            lets: lets != 0,
            after,
            shape: (blocks, threads),
            cluster,
        })
        .collect()
}
