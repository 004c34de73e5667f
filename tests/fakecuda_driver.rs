//! What the driver layer promises, shown against the stand-in driver.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "common/fakecuda.rs"]
mod fakecuda;

use cudarc::driver::sys;
use fakecuda::{calls, in_child, in_child_with, live, register_kernel, set_fail};
use peerlane::device::cuda::*;
use peerlane::Error;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Add {
    ptr: u64,
    count: u64,
    value: u32,
    reserved: u32,
}

/// A kernel: adds `value` to `count` words at `ptr`.
unsafe extern "C" fn add(args: *const Add) {
    // SAFETY: the stand-in driver passes a copy of the launch's parameter, whose addresses are memory of this process.
    unsafe {
        let args = &*args;
        for word in std::slice::from_raw_parts_mut(args.ptr as *mut u32, args.count as usize) {
            *word = word.wrapping_add(args.value);
        }
    }
}

const SHAPE: LaunchShape =
    LaunchShape { blocks: 4, threads: 128, shared_bytes: 0, programmatic: true };
const BUILT_WITH: CudaVersion = CudaVersion { major: 13, minor: 0 };

fn device(ordinal: u32) -> Context {
    Context::retain(&Device::by_ordinal(Driver::load().unwrap(), ordinal).unwrap()).unwrap()
}

fn adder(context: &Context) -> Function<Add> {
    register_kernel("add", add);
    Module::load(context, b"an image", BUILT_WITH).unwrap().function("add").unwrap()
}

fn current() -> usize {
    let mut context = std::ptr::null_mut();
    // SAFETY: writes one handle.
    assert_eq!(unsafe { sys::cuCtxGetCurrent(&mut context) }, sys::CUresult::CUDA_SUCCESS);
    context as usize
}

/// Waits for something that another thread brings about.
fn soon(what: &str, is: impl Fn() -> bool) {
    let start = Instant::now();
    while !is() {
        assert!(start.elapsed() < Duration::from_secs(10), "{what}: {:?}", live());
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn words(memory: &DeviceMemory, stream: &Stream) -> Vec<u32> {
    let mut bytes = vec![0; memory.bytes()];
    memory.read(stream, 0, &mut bytes).unwrap();
    bytes.chunks_exact(4).map(|c| u32::from_le_bytes(c.try_into().unwrap())).collect()
}

#[test]
fn a_box_without_cuda_is_not_supported_and_nothing_panics() {
    in_child_with("a_box_without_cuda_is_not_supported_and_nothing_panics", &[], "", || {
        // SAFETY: only opens the library.
        if unsafe { sys::is_culib_present() } {
            return; // a real driver is installed here
        }
        let error = Driver::load().unwrap_err();
        assert!(matches!(&error, Error::Unsupported(text) if text.contains("libcuda")), "{error}");
    });
}

#[test]
fn a_library_that_is_no_driver_is_an_error_that_names_a_missing_function() {
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("no-driver");
    std::fs::create_dir_all(&folder).unwrap();
    // Any real library without the functions will do.
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let library = maps.split_whitespace().find(|word| word.contains("libgcc_s.so")).unwrap();
    for name in ["libcuda.so", "libcuda.so.1"] {
        let _ = std::os::unix::fs::symlink(library, folder.join(name));
    }
    in_child_with(
        "a_library_that_is_no_driver_is_an_error_that_names_a_missing_function",
        &[],
        folder.to_str().unwrap(),
        || {
            let error = Driver::load().unwrap_err();
            assert!(matches!(&error, Error::Device(t) if t.contains("cuGetErrorName")), "{error}");
        },
    );
}

#[test]
fn a_box_without_devices_is_not_supported() {
    in_child("a_box_without_devices_is_not_supported", &[("FAKECUDA_DEVICES", "0")], || {
        let error = Driver::load().unwrap_err();
        assert!(
            matches!(&error, Error::Unsupported(t) if t.contains("CUDA_ERROR_NO_DEVICE")),
            "{error}"
        );
    });
}

#[test]
fn a_driver_that_refuses_to_start_is_named_and_may_be_tried_again() {
    let env = [("FAKECUDA_FAIL", "cuInit:1:*:802,cuDriverGetVersion:1:*:54321")];
    in_child("a_driver_that_refuses_to_start_is_named_and_may_be_tried_again", &env, || {
        let error = Driver::load().unwrap_err().to_string();
        assert!(error.contains("cuInit failed") && error.contains("fabric manager"), "{error}");
        // A code from a future driver has no name here, and is no undefined behaviour either.
        let error = Driver::load().unwrap_err().to_string();
        assert!(error.contains("cuDriverGetVersion failed: error 54321"), "{error}");
        assert_eq!(Driver::load().unwrap().version(), BUILT_WITH);
    });
}

#[test]
fn devices_are_known_by_uuid_whatever_cuda_visible_devices_says() {
    let name = "devices_are_known_by_uuid_whatever_cuda_visible_devices_says";
    let lists = ["0,1,2,3", "3,1", "GPU-fa6ecd02,1", "1,GPU-fa6ecd00-0000", "2,9,1", ""];
    for list in lists {
        let env = [("FAKECUDA_DEVICES", "4"), ("CUDA_VISIBLE_DEVICES", list)];
        in_child(name, &env, || {
            let list = std::env::var("CUDA_VISIBLE_DEVICES").unwrap();
            let expected: &[u8] = match list.as_str() {
                "0,1,2,3" => &[0, 1, 2, 3],
                "3,1" => &[3, 1],
                "GPU-fa6ecd02,1" => &[2, 1],
                "1,GPU-fa6ecd00-0000" => &[1, 0],
                "2,9,1" => &[2],
                _ => &[],
            };
            let Ok(driver) = Driver::load() else {
                assert!(expected.is_empty(), "{list}");
                return;
            };
            let devices = Device::all(driver).unwrap();
            let last: Vec<u8> = devices.iter().map(|d| d.facts().uuid.0[15]).collect();
            assert_eq!(last, expected, "{list}");
            for (ordinal, device) in devices.iter().enumerate() {
                let facts = device.facts();
                let found = Device::by_uuid(driver, facts.uuid).unwrap().unwrap();
                assert_eq!(found.facts(), facts);
                assert_eq!(Device::by_ordinal(driver, ordinal as u32).unwrap().facts(), facts);
                assert_eq!(facts.pci_bus_id, format!("0000:{:02x}:00.0", 0x10 + expected[ordinal]));
                assert_eq!((facts.compute_capability, facts.sm_count), ((9, 0), 132));
                assert!(facts.vmm_fd && facts.maps_host_memory && !facts.mig);
            }
            assert!(Device::by_uuid(driver, Uuid([7; 16])).unwrap().is_none());
        });
    }
}

#[test]
fn a_mig_slice_is_refused_with_the_reason() {
    in_child("a_mig_slice_is_refused_with_the_reason", &[("FAKECUDA_MIG", "1")], || {
        let devices = Device::all(Driver::load().unwrap()).unwrap();
        assert!(!devices[0].facts().mig && devices[1].facts().mig);
        Context::retain(&devices[0]).unwrap();
        let error = Context::retain(&devices[1]).unwrap_err();
        assert!(matches!(&error, Error::Unsupported(t) if t.contains("MIG slice")), "{error}");
        assert_eq!(live()[0], 0);
    });
}

#[test]
fn the_callers_current_context_comes_back() {
    in_child("the_callers_current_context_comes_back", &[], || {
        let (ours, callers) = (device(0), device(1));
        let mut raw = std::ptr::null_mut();
        assert_eq!(current(), 0);
        // SAFETY: writes one handle, and makes it current.
        unsafe {
            // With none current before.
            drop(ours.enter().unwrap());
            assert_eq!(current(), 0);
            let _ = sys::cuDevicePrimaryCtxRetain(&mut raw, 1);
            let _ = sys::cuCtxSetCurrent(raw);
        }
        let before = current();
        assert_ne!(before, 0);
        {
            let _outer = ours.enter().unwrap();
            assert_ne!(current(), before);
            // Everything that enters for itself, and nests.
            let stream = Stream::new(&callers, 0).unwrap();
            let memory = DeviceMemory::new(&callers, 64).unwrap();
            memory.zero(&stream).unwrap();
            let _inner = callers.enter().unwrap();
            assert_eq!(current(), before);
        }
        assert_eq!(current(), before);
        assert!(
            Device::current(ours.driver()).unwrap().unwrap().facts() == callers.device().facts()
        );
        // On the way out of an error as well.
        set_fail("cuMemAlloc:1:*:2");
        let error = DeviceMemory::new(&ours, 64).unwrap_err().to_string();
        assert!(error.contains("cuMemAlloc_v2 failed: CUDA_ERROR_OUT_OF_MEMORY"), "{error}");
        assert_eq!(current(), before);
    });
}

#[test]
fn the_peer_matrix_shows_the_holes_and_a_hole_is_an_answer() {
    let env = [("FAKECUDA_DEVICES", "4"), ("FAKECUDA_NO_PEER", "0-1,2-3,3-2")];
    in_child("the_peer_matrix_shows_the_holes_and_a_hole_is_an_answer", &env, || {
        let driver = Driver::load().unwrap();
        let matrix = peer_matrix(&Device::all(driver).unwrap()).unwrap();
        for (from, row) in matrix.iter().enumerate() {
            for (to, reachable) in row.iter().enumerate() {
                let hole = [(0, 1), (2, 3), (3, 2)].contains(&(from, to));
                assert_eq!(*reachable, !hole, "{from} to {to}");
            }
        }
        let contexts: Vec<_> = (0..4).map(device).collect();
        assert!(matches!(open_peer(&contexts[0], &contexts[1]).unwrap(), Edge::NoPeerAccess(_)));
        assert!(matches!(open_peer(&contexts[1], &contexts[0]).unwrap(), Edge::Open(())));
        // Somebody else's edge will do.
        assert!(matches!(open_peer(&contexts[1], &contexts[0]).unwrap(), Edge::Open(())));
        assert!(matches!(open_peer(&contexts[2], &contexts[2].clone()).unwrap(), Edge::Open(())));
        let memory = VmmMemory::new(&contexts[3], 1).unwrap();
        assert!(matches!(memory.grant(&contexts[2]).unwrap(), Edge::NoPeerAccess(_)));
        assert!(matches!(memory.grant(&contexts[0]).unwrap(), Edge::Open(())));
        let error = open_peer(&contexts[0], &contexts[1]).unwrap().required().unwrap_err();
        assert!(error.to_string().contains("no peer access"), "{error}");
    });
}

#[test]
fn the_ninth_peer_is_refused_in_its_own_words() {
    in_child("the_ninth_peer_is_refused_in_its_own_words", &[("FAKECUDA_DEVICES", "11")], || {
        let contexts: Vec<_> = (0..11).map(device).collect();
        for peer in &contexts[1..=8] {
            assert!(matches!(open_peer(&contexts[0], peer).unwrap(), Edge::Open(())));
        }
        let ninth = open_peer(&contexts[0], &contexts[9]).unwrap();
        assert!(matches!(&ninth, Edge::TooManyPeers(t) if t.contains("CUDA_ERROR_TOO_MANY_PEERS")));
        let error = ninth.required().unwrap_err().to_string();
        assert!(error.contains("no room for another peer"), "{error}");
        let memory = VmmMemory::new(&contexts[10], 1).unwrap();
        assert!(matches!(memory.grant(&contexts[0]).unwrap(), Edge::TooManyPeers(_)));
        // The others still have room.
        assert!(matches!(open_peer(&contexts[1], &contexts[9]).unwrap(), Edge::Open(())));
    });
}

#[test]
fn a_driver_older_than_the_kernels_is_told_both_versions() {
    let env = [("FAKECUDA_DRIVER_VERSION", "12080")];
    in_child("a_driver_older_than_the_kernels_is_told_both_versions", &env, || {
        let context = device(0);
        let load = |major, minor| Module::load(&context, b"image", CudaVersion { major, minor });
        let error = load(13, 0).unwrap_err();
        assert!(
            matches!(&error, Error::Unsupported(t) if t.contains("13.0") && t.contains("12.8")),
            "{error}"
        );
        // A newer minor version of the same major one is tried, and refused by the driver if it must be.
        load(12, 9).unwrap();
        set_fail("cuModuleLoadData:1:*:209");
        let error = load(12, 9).unwrap_err();
        assert!(
            matches!(&error, Error::Unsupported(t) if t.contains("12.9") && t.contains("12.8")
                && t.contains("9.0") && t.contains("NO_BINARY_FOR_GPU")),
            "{error}"
        );
        assert_eq!(live()[7], 0);
    });
}

#[test]
fn a_kernel_that_is_missing_or_of_another_build_is_refused_by_name() {
    in_child("a_kernel_that_is_missing_or_of_another_build_is_refused_by_name", &[], || {
        let context = device(0);
        register_kernel("add", add);
        let module = Module::load(&context, b"image", BUILT_WITH).unwrap();
        let error = module.function::<Add>("subtract").unwrap_err().to_string();
        assert!(
            error.contains("kernel subtract") && error.contains("cuModuleGetFunction"),
            "{error}"
        );
        let error = module.function::<[u8; 20]>("add").unwrap_err().to_string();
        assert!(error.contains("24 bytes") && error.contains("20"), "{error}");
        let add = module.function::<Add>("add").unwrap();
        assert_eq!((add.max_threads(), add.blocks_per_sm(512, 0).unwrap()), (1024, 4));
    });
}

#[test]
fn launches_run_in_order_on_any_stream() {
    in_child("launches_run_in_order_on_any_stream", &[], || {
        let context = device(0);
        let add = adder(&context);
        let own = Stream::new(&context, 0).unwrap();
        let memory = DeviceMemory::new(&context, 64).unwrap();
        memory.zero(&own).unwrap();
        let entered = context.enter().unwrap();
        let null = StreamRef::from_raw(std::ptr::null_mut());
        for (i, stream) in
            [own.as_ref(), StreamRef::LEGACY, StreamRef::PER_THREAD, null].into_iter().enumerate()
        {
            let args = Add { ptr: memory.ptr(), count: 16, value: 1 << (8 * i), reserved: 0 };
            // SAFETY: the memory lives until the stream has been waited for.
            unsafe { add.launch(&entered, stream, &SHAPE, &args) }.unwrap();
            stream.synchronize(&entered).unwrap();
            assert!(stream.is_idle(&entered).unwrap());
            assert_eq!(stream.capture(&entered).unwrap(), CaptureStatus::None);
        }
        assert_eq!(words(&memory, &own), [0x01010101; 16]);
        // Across streams by an event, which also takes the time.
        let other = Stream::new(&context, 0).unwrap();
        let (first, last) = (Event::timed(&context).unwrap(), Event::timed(&context).unwrap());
        first.record(&entered, own.as_ref()).unwrap();
        let args = Add { ptr: memory.ptr(), count: 16, value: 1, reserved: 0 };
        // SAFETY: as above.
        unsafe { add.launch(&entered, own.as_ref(), &SHAPE, &args) }.unwrap();
        last.record(&entered, own.as_ref()).unwrap();
        other.as_ref().wait(&entered, &last).unwrap();
        assert_eq!(words(&memory, &other), [0x01010102; 16]);
        last.synchronize(&entered).unwrap();
        assert!(last.is_done(&entered).unwrap() && last.since(&entered, &first).unwrap() >= 0.0);
    });
}

#[test]
fn kernels_of_several_streams_run_together() {
    in_child("kernels_of_several_streams_run_together", &[], || {
        /// Counts itself in and waits until all eight are there.
        unsafe extern "C" fn meet(args: *const Add) {
            use std::sync::atomic::{AtomicU32, Ordering};
            // SAFETY: the address is a word of device memory that is zeroed before the launches.
            let here = unsafe { AtomicU32::from_ptr((*args).ptr as *mut u32) };
            here.fetch_add(1, Ordering::SeqCst);
            while here.load(Ordering::SeqCst) < 8 {
                std::thread::yield_now();
            }
        }
        let context = device(0);
        register_kernel("meet", meet);
        let module = Module::load(&context, b"image", BUILT_WITH).unwrap();
        let meet = module.function::<Add>("meet").unwrap();
        let memory = DeviceMemory::new(&context, 4).unwrap();
        let streams: Vec<_> = (0..8).map(|_| Stream::new(&context, 0).unwrap()).collect();
        memory.zero(&streams[0]).unwrap();
        let entered = context.enter().unwrap();
        let args = Add { ptr: memory.ptr(), count: 1, value: 0, reserved: 0 };
        for stream in &streams {
            // SAFETY: the memory lives until all have been waited for.
            unsafe { meet.launch(&entered, stream.as_ref(), &SHAPE, &args) }.unwrap();
        }
        streams.iter().for_each(|stream| stream.synchronize().unwrap());
    });
}

#[test]
fn a_captured_launch_runs_at_every_replay_and_not_before() {
    in_child("a_captured_launch_runs_at_every_replay_and_not_before", &[], || {
        let context = device(0);
        let add = adder(&context);
        let (stream, side) = (Stream::new(&context, 0).unwrap(), Stream::new(&context, 0).unwrap());
        let memory = DeviceMemory::new(&context, 64).unwrap();
        memory.zero(&stream).unwrap();
        let entered = context.enter().unwrap();
        let (fork, join) = (Event::new(&context).unwrap(), Event::new(&context).unwrap());
        let capture = Capture::begin(&stream, CaptureMode::ThreadLocal).unwrap();
        let status = stream.as_ref().capture(&entered).unwrap();
        let CaptureStatus::Active(graph) = status else { panic!("{status:?}") };
        let mut args = Add { ptr: memory.ptr(), count: 16, value: 5, reserved: 0 };
        // SAFETY: the memory outlives the replays.
        unsafe { add.launch(&entered, stream.as_ref(), &SHAPE, &args) }.unwrap();
        // The parameters were copied.
        args.value = 100;
        fork.record(&entered, stream.as_ref()).unwrap();
        side.as_ref().wait(&entered, &fork).unwrap();
        assert_eq!(side.as_ref().capture(&entered).unwrap(), CaptureStatus::Active(graph));
        args.value = 2;
        // SAFETY: as above.
        unsafe { add.launch(&entered, side.as_ref(), &SHAPE, &args) }.unwrap();
        join.record(&entered, side.as_ref()).unwrap();
        stream.as_ref().wait(&entered, &join).unwrap();
        let graph = capture.end().unwrap();
        assert_eq!(side.as_ref().capture(&entered).unwrap(), CaptureStatus::None);
        let exec = graph.instantiate().unwrap();
        drop(graph);
        assert_eq!(words(&memory, &stream), [0; 16]);
        for replay in 1..=3 {
            exec.launch(&entered, stream.as_ref()).unwrap();
            assert_eq!(words(&memory, &stream), [7 * replay; 16]);
        }
    });
}

#[test]
fn a_captured_kernel_can_be_recorded_anew_while_the_capture_goes_on() {
    let name = "a_captured_kernel_can_be_recorded_anew_while_the_capture_goes_on";
    in_child(name, &[], || {
        let context = device(0);
        let (add, stream) = (adder(&context), Stream::new(&context, 0).unwrap());
        let memory = DeviceMemory::new(&context, 64).unwrap();
        memory.zero(&stream).unwrap();
        let entered = context.enter().unwrap();
        let end = || stream.as_ref().capture_with_end(&entered).unwrap();
        assert_eq!(end(), (CaptureStatus::None, None));
        let capture = Capture::begin(&stream, CaptureMode::ThreadLocal).unwrap();
        let (status, node) = end();
        assert!(matches!(status, CaptureStatus::Active(_)) && node.is_none(), "nothing yet");
        let args = |value| Add { ptr: memory.ptr(), count: 16, value, reserved: 0 };
        // SAFETY: the memory lives until the replays have been waited for.
        let launch = || unsafe { add.launch(&entered, stream.as_ref(), &SHAPE, &args(1)) }.unwrap();
        launch();
        let (_, first) = end();
        let mut recorded = RecordedKernel::with_room_for(size_of::<Add>());
        // SAFETY: nothing is handed over.
        assert!(unsafe { recorded.rewrite(&entered) }.is_err(), "nothing is remembered");
        assert!(recorded.remember(first.unwrap(), &add, &SHAPE, &args(1)));
        launch();
        let (_, second) = end();
        assert!(second.is_some() && second != first);
        // SAFETY: `params` is where the `Add` is that was remembered; as above, and the capture is under way.
        unsafe {
            (*recorded.params::<Add>()).value = 10;
            recorded.rewrite(&entered).unwrap();
        }
        let mut small = RecordedKernel::with_room_for(8);
        assert!(!small.remember(first.unwrap(), &add, &SHAPE, &args(1)), "there is no room");
        let graph = capture.end().unwrap().instantiate().unwrap();
        for replay in 1..=3 {
            graph.launch(&entered, stream.as_ref()).unwrap();
            assert_eq!(words(&memory, &stream)[..16], [11 * replay; 16]);
        }
    });
}

#[test]
fn a_stream_that_stands_at_more_than_one_node_has_no_end() {
    in_child("a_stream_that_stands_at_more_than_one_node_has_no_end", &[], || {
        let context = device(0);
        let entered = context.enter().unwrap();
        let memory = DeviceMemory::new(&context, 64).unwrap();
        let [stream, side] = [0, 1].map(|_| Stream::new(&context, 0).unwrap());
        let [fork, join] = [0, 1].map(|_| Event::new(&context).unwrap());
        let copy = |stream: &Stream| {
            let (to, from) = (memory.ptr(), memory.ptr() + 32);
            // SAFETY: both halves are the memory's; nothing of this ever runs.
            unsafe { memory::copy(&entered, to, from, 32, stream.as_ref()) }.unwrap();
        };
        let capture = Capture::begin(&stream, CaptureMode::ThreadLocal).unwrap();
        copy(&stream);
        let (_, before) = stream.as_ref().capture_with_end(&entered).unwrap();
        fork.record(&entered, stream.as_ref()).unwrap();
        side.as_ref().wait(&entered, &fork).unwrap();
        assert_eq!(side.as_ref().capture_with_end(&entered).unwrap().1, before, "the fork's own");
        for stream in [&stream, &side] {
            copy(stream);
        }
        join.record(&entered, side.as_ref()).unwrap();
        stream.as_ref().wait(&entered, &join).unwrap();
        let (status, end) = stream.as_ref().capture_with_end(&entered).unwrap();
        assert!(matches!(status, CaptureStatus::Active(_)) && end.is_none());
        drop(capture);
    });
}

#[test]
fn what_a_capture_forbids_is_an_error_and_set_up_can_be_exempted() {
    in_child("what_a_capture_forbids_is_an_error_and_set_up_can_be_exempted", &[], || {
        let context = device(0);
        let entered = context.enter().unwrap();
        let (stream, setup) =
            (Stream::new(&context, 0).unwrap(), Stream::new(&context, 0).unwrap());
        let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
        {
            // Everything that set-up does: allocate, zero, load, register.
            let _relaxed = RelaxedThread::new(&entered).unwrap();
            let memory = DeviceMemory::new(&context, 64).unwrap();
            memory.zero(&setup).unwrap();
            HostMemory::new(&context, 64, None).unwrap();
            VmmMemory::new(&context, 64).unwrap();
            adder(&context);
        }
        capture.end().unwrap();
        let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
        let error = DeviceMemory::new(&context, 64).unwrap_err().to_string();
        assert!(
            error.contains("cuMemAlloc_v2") && error.contains("CAPTURE_UNSUPPORTED"),
            "{error}"
        );
        assert_eq!(stream.as_ref().capture(&entered).unwrap(), CaptureStatus::Invalidated);
        let error = capture.end().unwrap_err().to_string();
        assert!(error.contains("CAPTURE_INVALIDATED"), "{error}");
        // The legacy stream cannot even be asked while a blocking stream is being captured.
        let mut raw = std::ptr::null_mut();
        // SAFETY: a stream of the caller's, as frameworks make them.
        unsafe {
            let _ = sys::cuStreamCreate(&mut raw, 0);
            let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
            let _ = sys::cuStreamBeginCapture_v2(raw, mode);
        }
        let error = StreamRef::LEGACY.capture(&entered).unwrap_err().to_string();
        assert!(error.contains("CAPTURE_IMPLICIT") && error.contains("legacy"), "{error}");
        // A capture that is dropped half-way leaves its stream usable.
        drop(Capture::begin(&stream, CaptureMode::Relaxed).unwrap());
        stream.synchronize().unwrap();
    });
}

#[test]
fn what_a_graph_keeps_goes_with_the_last_graph() {
    in_child("what_a_graph_keeps_goes_with_the_last_graph", &[], || {
        let context = device(0);
        let add = adder(&context);
        let entered = context.enter().unwrap();
        let stream = Stream::new(&context, 0).unwrap();
        let memory = DeviceMemory::new(&context, 64).unwrap();
        memory.zero(&stream).unwrap();
        let capture = Capture::begin(&stream, CaptureMode::Relaxed).unwrap();
        let CaptureStatus::Active(graph) = stream.as_ref().capture(&entered).unwrap() else {
            panic!("not captured")
        };
        let args = Add { ptr: memory.ptr(), count: 16, value: 1, reserved: 0 };
        // SAFETY: the graph keeps the memory.
        unsafe { add.launch(&entered, stream.as_ref(), &SHAPE, &args) }.unwrap();
        // Its drop frees device memory, which the driver's own notice must not do.
        keep_with_graph(&entered, graph, memory).unwrap();
        let graph = capture.end().unwrap();
        let (first, second) = (graph.instantiate().unwrap(), graph.instantiate().unwrap());
        let kept = || (live()[1], live()[12]);
        drop(graph);
        first.launch(&entered, stream.as_ref()).unwrap();
        stream.synchronize().unwrap();
        drop(first);
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(kept(), (1, 1));
        second.launch(&entered, stream.as_ref()).unwrap();
        stream.synchronize().unwrap();
        drop(second);
        soon("the memory goes with the last graph", || kept() == (0, 0));
        assert_eq!(calls("cuMemFree"), 1);
    });
}

#[test]
fn host_memory_is_one_for_gpu_and_host_and_every_holder_of_the_descriptor() {
    in_child("host_memory_is_one_for_gpu_and_host_and_every_holder_of_the_descriptor", &[], || {
        let (a, b) = (device(0), device(1));
        let add = adder(&a);
        let memory = HostMemory::new(&a, 100, None).unwrap();
        assert_eq!(memory.bytes(), 4096);
        let fd = memory.pages().export().unwrap();
        let peer = HostMemory::import(&b, fd.as_fd(), memory.bytes()).unwrap();
        let stream = Stream::new(&a, 0).unwrap();
        let entered = a.enter().unwrap();
        let args = Add { ptr: memory.device_ptr(), count: 1024, value: 3, reserved: 0 };
        // SAFETY: the memory outlives the launch, which is waited for.
        unsafe { add.launch(&entered, stream.as_ref(), &SHAPE, &args) }.unwrap();
        stream.synchronize().unwrap();
        for seen in [memory.host_ptr(), peer.host_ptr()] {
            // SAFETY: one page that nobody writes to now.
            assert_eq!(unsafe { seen.cast::<u32>().add(1023).read_volatile() }, 3);
        }
        let error = HostMemory::import(&b, fd.as_fd(), 8192).unwrap_err().to_string();
        assert!(error.contains("4096") && error.contains("8192"), "{error}");
        drop((memory, peer));
        assert_eq!(live()[6], 0);
    });
}

#[test]
fn a_gpu_that_cannot_map_host_memory_has_no_host_staged_lane() {
    let env = [("FAKECUDA_NO_HOST_MAP", "1")];
    in_child("a_gpu_that_cannot_map_host_memory_has_no_host_staged_lane", &env, || {
        let error = HostMemory::new(&device(0), 1, None).unwrap_err();
        assert!(matches!(error, Error::Unsupported(_)), "{error}");
    });
}

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
