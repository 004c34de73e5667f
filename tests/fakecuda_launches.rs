//! What the driver layer promises of kernels, launches and graphs, shown against the stand-in driver.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "common/driver.rs"]
mod driver;
#[path = "common/fakecuda.rs"]
mod fakecuda;

use cudarc::driver::sys;
use driver::{add, adder, device, soon, words, Add, BUILT_WITH, SHAPE};
use fakecuda::{calls, in_child, live, register_kernel, set_fail};
use peerlane::device::cuda::*;
use peerlane::Error;
use std::time::Duration;

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
