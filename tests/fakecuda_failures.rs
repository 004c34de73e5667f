//! What the driver layer promises of calls that fail, every one of them: shown against the stand-in driver.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "common/driver.rs"]
mod driver;
#[path = "common/fakecuda.rs"]
mod fakecuda;

use driver::{add, soon, Add, BUILT_WITH, SHAPE};
use fakecuda::{calls, in_child, live, register_kernel, set_fail};
use peerlane::device::cuda::*;
use std::os::fd::AsFd;

/// Every call of the layer that one process can make.
fn everything() -> peerlane::Result<()> {
    let driver = Driver::load()?;
    let devices = Device::all(driver)?;
    peer_matrix(&devices)?;
    let (context, peer) = (Context::retain(&devices[0])?, Context::retain(&devices[1])?);
    open_peer(&context, &peer)?.required()?;
    let entered = context.enter()?;
    Device::current(driver)?;
    let stream = Stream::new(&context, 0)?;
    let memory = DeviceMemory::new(&context, 64)?;
    memory::available(&entered)?;
    memory.zero(&stream)?;
    memory.write(&stream, 0, &[1; 64])?;
    memory.read(&stream, 0, &mut [0; 64])?;
    let slab = VmmMemory::new(&context, 1)?;
    slab.grant(&peer)?.required()?;
    let fd = slab.export()?;
    let imported = VmmMemory::import(&peer, fd.as_fd(), slab.bytes())?.required()?;
    // SAFETY: both are mapped and larger, and waited for.
    unsafe { memory::copy(&entered, imported.ptr(), slab.ptr(), 64, stream.as_ref()) }?;
    // Unmapping under a copy that is under way would be the caller's mistake, whichever call has failed.
    stream.synchronize().inspect_err(|_| stream.synchronize().unwrap())?;
    let ipc = IpcMemory::new(&context, 1)?;
    ipc.export([])?;
    HostMemory::new(&context, 1, None)?;
    let module = Module::load(&context, b"image", BUILT_WITH)?;
    let add = module.function::<Add>("add")?;
    add.blocks_per_sm(128, 0)?;
    add.most_clusters(128, 16)?;
    let (first, last) = (Event::timed(&context)?, Event::timed(&context)?);
    first.record(&entered, stream.as_ref())?;
    last.record(&entered, stream.as_ref())?;
    stream.as_ref().wait(&entered, &last)?;
    last.synchronize(&entered)?;
    last.is_done(&entered)?;
    last.since(&entered, &first)?;
    stream.synchronize()?;
    stream.as_ref().is_idle(&entered)?;
    drop(RelaxedThread::new(&entered)?);
    let capture = Capture::begin(&stream, CaptureMode::Relaxed)?;
    if let CaptureStatus::Active(graph) = stream.as_ref().capture(&entered)? {
        keep_with_graph(&entered, graph, module.clone())?;
    }
    let args = Add { ptr: memory.ptr(), count: 16, value: 1, reserved: 0 };
    // SAFETY: the memory lives until the replay has been waited for.
    unsafe { add.launch(&entered, stream.as_ref(), &SHAPE, &args) }?;
    let mut recorded = RecordedKernel::with_room_for(size_of::<Add>());
    if let (_, Some(node)) = stream.as_ref().capture_with_end(&entered)? {
        assert!(recorded.remember(node, &add, &SHAPE, &args));
        // SAFETY: as above, and the capture is under way.
        unsafe { recorded.rewrite(&entered) }?;
    }
    let exec = capture.end()?.instantiate()?;
    exec.upload(&entered, stream.as_ref())?;
    exec.launch(&entered, stream.as_ref())?;
    stream.as_ref().id(&entered)?;
    stream.synchronize()
}

/// The names of the driver's functions that the layer declares, from its source.
fn declared() -> Vec<&'static str> {
    let source = include_str!("../src/device/cuda/symbols.rs");
    let start = source.rfind("symbols! {").unwrap();
    source[start..].split("fn ").skip(1).map(|rest| &rest[..rest.find('(').unwrap()]).collect()
}

#[test]
fn every_call_that_fails_is_named_and_leaks_nothing() {
    in_child("every_call_that_fails_is_named_and_leaks_nothing", &[], || {
        let _ = Driver::load().unwrap();
        register_kernel("add", add);
        set_fail("");
        everything().unwrap();
        let nothing = [0; 13];
        soon("nothing is left of a good run", || live() == nothing);
        let mut made: Vec<(&str, u64)> = declared().into_iter().map(|n| (n, calls(n))).collect();
        // Made when the driver is loaded, after a failure, with a peer process; see the other tests.
        let elsewhere = [
            "cuInit",
            "cuDriverGetVersion",
            "cuGetErrorName",
            "cuGetErrorString",
            "cuIpcOpenMemHandle_v2",
            "cuIpcCloseMemHandle",
            "cuUserObjectRelease",
        ];
        for (name, count) in &made {
            assert_eq!(*count == 0, elsewhere.contains(name), "{name} was called {count} times");
        }
        // What gives something back has nobody to tell; that it failed must not stop the rest.
        let gives_back = |name: &str| {
            ["Destroy", "Free", "Release", "Unmap", "Unregister", "Unload", "PopCurrent"]
                .iter()
                .any(|part| name.contains(part))
        };
        let mut failures = 0;
        // What is needed to give something back as well goes last: where that fails, the thing stays.
        let needed_for_drops =
            |name: &str| ["cuCtxGetCurrent", "cuCtxPushCurrent_v2"].contains(&name);
        made.sort_by_key(|(name, _)| needed_for_drops(name));
        for (name, count) in made {
            if gives_back(name) {
                continue;
            }
            for nth in 1..=count {
                set_fail(&format!("{name}:{nth}:*:700"));
                match everything() {
                    Err(error) => {
                        let text = error.to_string();
                        assert!(text.contains(name), "{name} {nth}: {text}");
                        assert!(
                            text.contains("CUDA_ERROR_ILLEGAL_ADDRESS"),
                            "{name} {nth}: {text}"
                        );
                        failures += 1;
                    }
                    // An attribute that only some drivers know, and guards that drops enter and leave.
                    Ok(()) => assert!(
                        needed_for_drops(name)
                            || name == "cuThreadExchangeStreamCaptureMode"
                            || name == "cuDeviceGetAttribute",
                        "{name} {nth} was ignored"
                    ),
                }
                set_fail("");
                if !needed_for_drops(name) {
                    soon(&format!("{name} {nth} leaks"), || live() == nothing);
                }
            }
        }
        assert!(failures > 60, "only {failures} failures were seen");
    });
}
