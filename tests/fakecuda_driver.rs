//! What the driver layer promises of drivers, devices, contexts, peers and host memory, shown against the stand-in driver.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "common/driver.rs"]
mod driver;
#[path = "common/fakecuda.rs"]
mod fakecuda;

use cudarc::driver::sys;
use driver::{adder, device, Add, BUILT_WITH, SHAPE};
use fakecuda::{in_child, in_child_with, live, set_fail};
use peerlane::device::cuda::*;
use peerlane::Error;
use std::os::fd::AsFd;

fn current() -> usize {
    let mut context = std::ptr::null_mut();
    // SAFETY: writes one handle.
    assert_eq!(unsafe { sys::cuCtxGetCurrent(&mut context) }, sys::CUresult::CUDA_SUCCESS);
    context as usize
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
