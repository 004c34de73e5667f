//! A local rank's GPU, as the stand-in driver has it.

use peerlane_core::device::cuda::{
    Capture, CaptureMode, Context, Device, DeviceMemory, Driver, Event, GraphExec, Stream,
};
use peerlane_nccl_core::types::*;
use std::ffi::c_void;

/// One local rank's GPU.
pub struct Gpu {
    pub context: Context,
    pub stream: Stream,
}

impl Gpu {
    pub fn new(ordinal: u32) -> Self {
        let context =
            Context::retain(&Device::by_ordinal(Driver::load().unwrap(), ordinal).unwrap())
                .unwrap();
        let stream = Stream::new(&context, 0).unwrap();
        Gpu { context, stream }
    }

    pub fn buffer(&self, values: &[f32]) -> Buffer {
        let memory = DeviceMemory::new(&self.context, size_of_val(values).max(4)).unwrap();
        let buffer = Buffer { memory, count: values.len() };
        buffer.set(self, values);
        buffer
    }

    pub fn event(&self) -> Event {
        Event::new(&self.context).unwrap()
    }

    pub fn raw(&self) -> cudaStream_t {
        self.stream.as_ref().as_raw().cast()
    }

    pub fn capture(&self, calls: impl FnOnce()) -> GraphExec {
        let capture = Capture::begin(&self.stream, CaptureMode::ThreadLocal).unwrap();
        calls();
        capture.end().unwrap().instantiate().unwrap()
    }

    pub fn replay(&self, graph: &GraphExec) {
        graph.launch(&self.context.enter().unwrap(), self.stream.as_ref()).unwrap();
        self.stream.synchronize().unwrap();
    }
}

pub struct Buffer {
    memory: DeviceMemory,
    pub count: usize,
}

impl Buffer {
    pub fn at(&self) -> *mut c_void {
        self.memory.ptr() as *mut c_void
    }

    pub fn set(&self, gpu: &Gpu, values: &[f32]) {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_ne_bytes()).collect();
        self.memory.write(&gpu.stream, 0, &bytes).unwrap();
    }

    pub fn get(&self, gpu: &Gpu) -> Vec<f32> {
        let mut bytes = vec![0; self.count * 4];
        self.memory.read(&gpu.stream, 0, &mut bytes).unwrap();
        bytes.chunks(4).map(|b| f32::from_ne_bytes(b.try_into().unwrap())).collect()
    }
}
