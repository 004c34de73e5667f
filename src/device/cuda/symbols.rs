//! The driver's functions: looked up once, each returning its result code as a plain number.
//!
//! cudarc's own wrappers panic on a symbol that the installed driver lacks and read the result code into a Rust `enum`,
//! which is undefined behaviour as soon as a newer driver returns a code that this build does not know. So only the types
//! and the loaded library come from cudarc; every declaration is checked against cudarc's at compile time.

use cudarc::driver::sys;
use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

/// A driver call that did not succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub call: &'static str,
    pub code: u32,
}

fn check(call: &'static str, code: u32) -> Result<(), Failure> {
    match code {
        0 => Ok(()),
        code => Err(Failure { call, code }),
    }
}

macro_rules! symbols {
    (
        numbered { $(fn $nname:ident($($narg:ident: $nty:ty),* $(,)?);)* }
        required { $(fn $name:ident($($arg:ident: $ty:ty),* $(,)?);)* }
        optional { $(fn $oname:ident($($oarg:ident: $oty:ty),* $(,)?);)* }
    ) => {
        // The declarations below are cudarc's, or this does not compile.
        $(const _: unsafe fn($($ty),*) -> sys::CUresult = sys::$name;)*
        $(const _: unsafe fn($($oty),*) -> sys::CUresult = sys::$oname;)*

        #[allow(non_snake_case)]
        pub(super) struct Symbols {
            $($nname: unsafe extern "C" fn($($nty),*) -> u32,)*
            $($name: unsafe extern "C" fn($($ty),*) -> u32,)*
            $($oname: Option<unsafe extern "C" fn($($oty),*) -> u32>,)*
        }

        #[allow(non_snake_case, clippy::too_many_arguments)]
        impl Symbols {
            /// Looks every function up; the error lists those that the driver lacks.
            pub(super) fn load() -> Result<Self, Vec<&'static str>> {
                let mut missing = Vec::new();
                $(
                    // SAFETY: as below; an enum that may hold a value newer than this build is a number here.
                    let $nname = unsafe {
                        sys::culib()
                            .get::<unsafe extern "C" fn($($nty),*) -> u32>(stringify!($nname).as_bytes())
                            .map(|symbol| *symbol)
                            .inspect_err(|_| missing.push(stringify!($nname)))
                    };
                )*
                $(
                    // SAFETY: the caller has found the library to be present, so this does not panic; the symbol's type
                    // is the driver's own, with the result enum read as the number that it is in C.
                    let $name = unsafe {
                        sys::culib()
                            .get::<unsafe extern "C" fn($($ty),*) -> u32>(stringify!($name).as_bytes())
                            .map(|symbol| *symbol)
                            .inspect_err(|_| missing.push(stringify!($name)))
                    };
                )*
                if !missing.is_empty() {
                    return Err(missing);
                }
                Ok(Symbols {
                    $($nname: match $nname {
                        Ok(function) => function,
                        Err(_) => return Err(vec![stringify!($nname)]),
                    },)*
                    $($name: match $name {
                        Ok(function) => function,
                        Err(_) => return Err(vec![stringify!($name)]),
                    },)*
                    $(
                        // SAFETY: as above.
                        $oname: unsafe {
                            sys::culib()
                                .get::<unsafe extern "C" fn($($oty),*) -> u32>(stringify!($oname).as_bytes())
                                .map(|symbol| *symbol)
                                .ok()
                        },
                    )*
                })
            }

            $(
                pub(super) unsafe fn $nname(&self, $($narg: $nty),*) -> Result<(), Failure> {
                    // SAFETY: passed on to the caller: the arguments are what the driver's documentation asks for.
                    check(stringify!($nname), unsafe { (self.$nname)($($narg),*) })
                }
            )*
            $(
                pub(super) unsafe fn $name(&self, $($arg: $ty),*) -> Result<(), Failure> {
                    // SAFETY: passed on to the caller: the arguments are what the driver's documentation asks for.
                    check(stringify!($name), unsafe { (self.$name)($($arg),*) })
                }
            )*
            $(
                /// `None`: the driver is too old to have it.
                pub(super) unsafe fn $oname(&self, $($oarg: $oty),*) -> Option<Result<(), Failure>> {
                    // SAFETY: passed on to the caller: the arguments are what the driver's documentation asks for.
                    self.$oname.map(|f| check(stringify!($oname), unsafe { f($($oarg),*) }))
                }
            )*
        }
    };
}

symbols! {
    // Enums that cross here may hold values that this build does not know: the compiler cannot compare these declarations.
    numbered {
        fn cuGetErrorName(error: u32, text: *mut *const c_char);
        fn cuGetErrorString(error: u32, text: *mut *const c_char);
        fn cuStreamGetCaptureInfo_v2(
            stream: sys::CUstream,
            status: *mut u32,
            id: *mut u64,
            graph: *mut sys::CUgraph,
            dependencies: *mut *const sys::CUgraphNode,
            count: *mut usize,
        );
    }
    required {
        fn cuInit(flags: c_uint);
        fn cuDriverGetVersion(version: *mut c_int);

        fn cuDeviceGetCount(count: *mut c_int);
        fn cuDeviceGet(device: *mut sys::CUdevice, ordinal: c_int);
        fn cuDeviceGetName(name: *mut c_char, len: c_int, device: sys::CUdevice);
        fn cuDeviceGetUuid(uuid: *mut sys::CUuuid, device: sys::CUdevice);
        fn cuDeviceGetUuid_v2(uuid: *mut sys::CUuuid, device: sys::CUdevice);
        fn cuDeviceGetPCIBusId(id: *mut c_char, len: c_int, device: sys::CUdevice);
        fn cuDeviceGetAttribute(value: *mut c_int, attribute: sys::CUdevice_attribute, device: sys::CUdevice);
        fn cuDeviceTotalMem_v2(bytes: *mut usize, device: sys::CUdevice);
        fn cuDeviceCanAccessPeer(can: *mut c_int, device: sys::CUdevice, peer: sys::CUdevice);

        fn cuDevicePrimaryCtxRetain(context: *mut sys::CUcontext, device: sys::CUdevice);
        fn cuDevicePrimaryCtxRelease_v2(device: sys::CUdevice);
        fn cuCtxGetCurrent(context: *mut sys::CUcontext);
        fn cuCtxPushCurrent_v2(context: sys::CUcontext);
        fn cuCtxPopCurrent_v2(context: *mut sys::CUcontext);
        fn cuCtxGetDevice(device: *mut sys::CUdevice);
        fn cuCtxEnablePeerAccess(peer: sys::CUcontext, flags: c_uint);

        fn cuMemAlloc_v2(ptr: *mut sys::CUdeviceptr, bytes: usize);
        fn cuMemFree_v2(ptr: sys::CUdeviceptr);
        fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
        fn cuMemcpyHtoDAsync_v2(dst: sys::CUdeviceptr, src: *const c_void, bytes: usize, stream: sys::CUstream);
        fn cuMemcpyDtoHAsync_v2(dst: *mut c_void, src: sys::CUdeviceptr, bytes: usize, stream: sys::CUstream);
        fn cuMemcpyAsync(dst: sys::CUdeviceptr, src: sys::CUdeviceptr, bytes: usize, stream: sys::CUstream);
        fn cuMemsetD8Async(dst: sys::CUdeviceptr, value: u8, count: usize, stream: sys::CUstream);

        fn cuMemGetAllocationGranularity(
            granularity: *mut usize,
            properties: *const sys::CUmemAllocationProp,
            which: sys::CUmemAllocationGranularity_flags,
        );
        fn cuMemCreate(
            handle: *mut sys::CUmemGenericAllocationHandle,
            bytes: usize,
            properties: *const sys::CUmemAllocationProp,
            flags: c_ulonglong,
        );
        fn cuMemRelease(handle: sys::CUmemGenericAllocationHandle);
        fn cuMemAddressReserve(
            ptr: *mut sys::CUdeviceptr,
            bytes: usize,
            alignment: usize,
            at: sys::CUdeviceptr,
            flags: c_ulonglong,
        );
        fn cuMemAddressFree(ptr: sys::CUdeviceptr, bytes: usize);
        fn cuMemMap(
            ptr: sys::CUdeviceptr,
            bytes: usize,
            offset: usize,
            handle: sys::CUmemGenericAllocationHandle,
            flags: c_ulonglong,
        );
        fn cuMemUnmap(ptr: sys::CUdeviceptr, bytes: usize);
        fn cuMemSetAccess(ptr: sys::CUdeviceptr, bytes: usize, access: *const sys::CUmemAccessDesc, count: usize);
        fn cuMemExportToShareableHandle(
            shareable: *mut c_void,
            handle: sys::CUmemGenericAllocationHandle,
            kind: sys::CUmemAllocationHandleType,
            flags: c_ulonglong,
        );
        fn cuMemImportFromShareableHandle(
            handle: *mut sys::CUmemGenericAllocationHandle,
            shareable: *mut c_void,
            kind: sys::CUmemAllocationHandleType,
        );
        fn cuIpcGetMemHandle(handle: *mut sys::CUipcMemHandle, ptr: sys::CUdeviceptr);
        fn cuIpcOpenMemHandle_v2(ptr: *mut sys::CUdeviceptr, handle: sys::CUipcMemHandle, flags: c_uint);
        fn cuIpcCloseMemHandle(ptr: sys::CUdeviceptr);
        fn cuMemHostRegister_v2(ptr: *mut c_void, bytes: usize, flags: c_uint);
        fn cuMemHostUnregister(ptr: *mut c_void);
        fn cuMemHostGetDevicePointer_v2(device: *mut sys::CUdeviceptr, host: *mut c_void, flags: c_uint);

        fn cuModuleLoadData(module: *mut sys::CUmodule, image: *const c_void);
        fn cuModuleUnload(module: sys::CUmodule);
        fn cuModuleGetFunction(function: *mut sys::CUfunction, module: sys::CUmodule, name: *const c_char);
        fn cuFuncGetAttribute(value: *mut c_int, attribute: sys::CUfunction_attribute, function: sys::CUfunction);
        fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
            blocks: *mut c_int,
            function: sys::CUfunction,
            block: c_int,
            shared: usize,
        );
        fn cuFuncSetAttribute(function: sys::CUfunction, attribute: sys::CUfunction_attribute, value: c_int);
        fn cuOccupancyMaxActiveClusters(
            clusters: *mut c_int,
            function: sys::CUfunction,
            config: *const sys::CUlaunchConfig,
        );
        fn cuLaunchKernelEx(
            config: *const sys::CUlaunchConfig,
            function: sys::CUfunction,
            params: *mut *mut c_void,
            extra: *mut *mut c_void,
        );

        fn cuStreamCreateWithPriority(stream: *mut sys::CUstream, flags: c_uint, priority: c_int);
        fn cuStreamDestroy_v2(stream: sys::CUstream);
        fn cuStreamSynchronize(stream: sys::CUstream);
        fn cuStreamQuery(stream: sys::CUstream);
        fn cuStreamWaitEvent(stream: sys::CUstream, event: sys::CUevent, flags: c_uint);
        fn cuStreamBeginCapture_v2(stream: sys::CUstream, mode: sys::CUstreamCaptureMode);
        fn cuStreamEndCapture(stream: sys::CUstream, graph: *mut sys::CUgraph);
        fn cuThreadExchangeStreamCaptureMode(mode: *mut sys::CUstreamCaptureMode);
        fn cuEventCreate(event: *mut sys::CUevent, flags: c_uint);
        fn cuEventRecord(event: sys::CUevent, stream: sys::CUstream);
        fn cuEventQuery(event: sys::CUevent);
        fn cuEventSynchronize(event: sys::CUevent);
        fn cuEventElapsedTime(milliseconds: *mut f32, start: sys::CUevent, end: sys::CUevent);
        fn cuEventDestroy_v2(event: sys::CUevent);

        fn cuGraphKernelNodeSetParams_v2(node: sys::CUgraphNode, params: *const sys::CUDA_KERNEL_NODE_PARAMS);
        fn cuGraphInstantiateWithFlags(exec: *mut sys::CUgraphExec, graph: sys::CUgraph, flags: c_ulonglong);
        fn cuGraphLaunch(exec: sys::CUgraphExec, stream: sys::CUstream);
        fn cuGraphExecDestroy(exec: sys::CUgraphExec);
        fn cuGraphDestroy(graph: sys::CUgraph);
        fn cuUserObjectCreate(
            object: *mut sys::CUuserObject,
            ptr: *mut c_void,
            destroy: sys::CUhostFn,
            references: c_uint,
            flags: c_uint,
        );
        fn cuUserObjectRelease(object: sys::CUuserObject, references: c_uint);
        fn cuGraphRetainUserObject(
            graph: sys::CUgraph,
            object: sys::CUuserObject,
            references: c_uint,
            flags: c_uint,
        );
    }
    optional {
        fn cuStreamGetId(stream: sys::CUstream, id: *mut c_ulonglong);
        fn cuStreamGetCaptureInfo_v3(
            stream: sys::CUstream,
            status: *mut sys::CUstreamCaptureStatus,
            id: *mut sys::cuuint64_t,
            graph: *mut sys::CUgraph,
            dependencies: *mut *const sys::CUgraphNode,
            edges: *mut *const sys::CUgraphEdgeData,
            count: *mut usize,
        );
        fn cuGraphUpload(exec: sys::CUgraphExec, stream: sys::CUstream);
        fn cuFuncLoad(function: sys::CUfunction);
        fn cuFuncGetParamInfo(function: sys::CUfunction, index: usize, offset: *mut usize, bytes: *mut usize);
    }
}
