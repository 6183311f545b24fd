//! The driver, as little of it as is needed: a context with the stream of the steps, memory, launches, events.
//!
//! Everything `unsafe` about pointers that live on the device is here: a [`DeviceMemory`] knows its size and frees itself.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use baton_backend::BackendError;
use cudarc::driver::result as driver;
use cudarc::driver::sys;
use cudarc::driver::{CudaContext, DriverError};

use crate::clock::from_milliseconds;
use crate::params::TensorMap;
use crate::pinned::PinnedMemory;
use crate::probe::Properties;

/// Every failure of the driver, with what was being done.
pub(crate) fn failed(doing: &str) -> impl Fn(DriverError) -> BackendError + '_ {
    move |error| BackendError::Device { cause: format!("{doing}: {error}") }
}

/// A device with the stream that its steps run on.
#[derive(Debug)]
pub(crate) struct Gpu {
    context: Arc<CudaContext>,
    pub(crate) stream: Stream,
    pub(crate) properties: Properties,
    /// Kernels may start while the one before drains (sm_90 and later).
    overlaps_launches: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Stream(pub(crate) sys::CUstream);
// SAFETY: a stream may be used from any thread; the backend is used by one at a time.
unsafe impl Send for Stream {}

impl Stream {
    /// What is launched from here on starts when everything before the event is done.
    pub(crate) fn wait_for(self, event: &Event) -> Result<(), BackendError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: stream and event are alive.
        unsafe { driver::stream::wait_event(self.0, event.0, flags) }
            .map_err(failed("waiting for another stream"))
    }

    /// Starts copying `bytes` bytes of pinned memory.
    pub(crate) fn upload(
        self,
        from: &PinnedMemory,
        to: &DeviceMemory,
        offset: usize,
        bytes: usize,
    ) -> Result<(), BackendError> {
        assert!(bytes <= from.bytes() && offset + bytes <= to.bytes, "an upload stays within its memory");
        // SAFETY: both ranges were just checked; the pinned side outlives the copy, which its owner waits for.
        unsafe { sys::cuMemcpyHtoDAsync_v2(to.pointer + offset as u64, from.as_ptr().cast(), bytes, self.0) }
            .result()
            .map_err(failed("copying to the device"))
    }

    /// Starts copying a part of pinned memory to a part of the device's.
    pub(crate) fn copy_in(
        self,
        from: (&PinnedMemory, usize),
        to: (&DeviceMemory, usize),
        bytes: usize,
    ) -> Result<(), BackendError> {
        let ends = (from.1.checked_add(bytes), to.1.checked_add(bytes));
        assert!(ends.0.is_some_and(|end| end <= from.0.bytes()), "a copy reads within its memory");
        assert!(ends.1.is_some_and(|end| end <= to.0.bytes), "a copy writes within its memory");
        // SAFETY: both ranges were just checked; the owner of the pinned side waits for the copy.
        unsafe {
            let source = from.0.as_ptr().add(from.1);
            sys::cuMemcpyHtoDAsync_v2(to.0.pointer + to.1 as u64, source.cast(), bytes, self.0)
        }
        .result()
        .map_err(failed("copying to the device"))
    }

    /// The same the other way.
    pub(crate) fn copy_out(
        self,
        from: (&DeviceMemory, usize),
        to: (&PinnedMemory, usize),
        bytes: usize,
    ) -> Result<(), BackendError> {
        let ends = (from.1.checked_add(bytes), to.1.checked_add(bytes));
        assert!(ends.0.is_some_and(|end| end <= from.0.bytes), "a copy reads within its memory");
        assert!(ends.1.is_some_and(|end| end <= to.0.bytes()), "a copy writes within its memory");
        // SAFETY: as above.
        unsafe {
            let target = to.0.as_ptr().add(to.1);
            sys::cuMemcpyDtoHAsync_v2(target.cast(), from.0.pointer + from.1 as u64, bytes, self.0)
        }
        .result()
        .map_err(failed("copying from the device"))
    }

    pub(crate) fn synchronize(self) -> Result<(), BackendError> {
        // SAFETY: the stream is alive.
        unsafe { driver::stream::synchronize(self.0) }.map_err(failed("waiting for the device"))
    }

    /// Waits for its work and ends it. Whoever made it calls this once, last.
    pub(crate) fn destroy(self) {
        let _ = self.synchronize();
        // SAFETY: by the above. Failing (no context any more) leaves nothing behind.
        let _ = unsafe { driver::stream::destroy(self.0) };
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Function(pub(crate) sys::CUfunction);
// SAFETY: as for `Stream`.
unsafe impl Send for Function {}

fn new_stream() -> Result<Stream, BackendError> {
    let kind = driver::stream::StreamKind::NonBlocking;
    driver::stream::create(kind).map(Stream).map_err(failed("making a stream"))
}

impl Gpu {
    pub(crate) fn new(properties: Properties) -> Result<Self, BackendError> {
        let context = CudaContext::new(properties.ordinal).map_err(failed("making a context"))?;
        // SAFETY: all work is on streams of ours; nothing relies on cudarc's own ordering.
        unsafe { context.disable_event_tracking() };
        let overlaps_launches = properties.capability.0 >= 9;
        Ok(Self { stream: new_stream()?, context, properties, overlaps_launches })
    }

    /// Another stream, which runs beside that of the steps.
    pub(crate) fn new_stream(&self) -> Result<Stream, BackendError> {
        self.bind()?;
        new_stream()
    }

    /// Makes this device the current one of the calling thread, which may not be the one it was made on.
    pub(crate) fn bind(&self) -> Result<(), BackendError> {
        self.context.bind_to_thread().map_err(failed("entering the context"))
    }

    pub(crate) fn free_bytes(&self) -> u64 {
        self.bind().ok().and_then(|()| driver::mem_get_info().ok()).map_or(0, |(free, _)| free as u64)
    }

    /// Memory full of zeros.
    pub(crate) fn allocate(&self, bytes: usize, what: &str) -> Result<DeviceMemory, BackendError> {
        self.bind()?;
        let padded = bytes.max(1).next_multiple_of(256);
        // SAFETY: the context is current; the memory is freed once, by `DeviceMemory`.
        let pointer = unsafe { driver::malloc_sync(padded) }.map_err(|_| BackendError::OutOfMemory {
            what: what.to_owned(),
            needed_bytes: padded as u64,
            free_bytes: self.free_bytes(),
        })?;
        let memory = DeviceMemory { pointer, bytes: padded, context: Arc::clone(&self.context) };
        memory.clear(self)?;
        Ok(memory)
    }

    /// Host memory that the device can copy from and read directly.
    pub(crate) fn allocate_pinned(&self, bytes: usize, what: &str) -> Result<PinnedMemory, BackendError> {
        self.bind()?;
        PinnedMemory::new(Arc::clone(&self.context), bytes, what)
    }

    /// Starts copying `bytes` bytes of pinned memory.
    pub(crate) fn upload(
        &self,
        from: &PinnedMemory,
        to: &DeviceMemory,
        offset: usize,
        bytes: usize,
    ) -> Result<(), BackendError> {
        self.stream.upload(from, to, offset, bytes)
    }

    pub(crate) fn download(
        &self,
        from: &DeviceMemory,
        to: &PinnedMemory,
        bytes: usize,
    ) -> Result<(), BackendError> {
        assert!(bytes <= from.bytes && bytes <= to.bytes(), "a download stays within its memory");
        // SAFETY: as for `upload`.
        unsafe { sys::cuMemcpyDtoHAsync_v2(to.as_ptr().cast(), from.pointer, bytes, self.stream.0) }
            .result()
            .map_err(failed("copying from the device"))
    }

    pub(crate) fn synchronize(&self) -> Result<(), BackendError> {
        self.bind()?;
        self.stream.synchronize()
    }

    /// Launches a kernel whose only argument is the struct `params`, as part of the step.
    ///
    /// # Safety
    /// `params` must be the struct that the kernel declares, and its pointers good for what the kernel does with them.
    pub(crate) unsafe fn launch<P>(
        &self,
        function: Function,
        grid: (u32, u32),
        threads: u32,
        shared_bytes: u32,
        params: &P,
    ) -> Result<(), BackendError> {
        // SAFETY: by contract.
        unsafe { self.launch_on(self.stream, function, grid, threads, shared_bytes, params) }
    }

    /// The same in clusters of so many neighbouring blocks.
    ///
    /// # Safety
    /// As for `launch`.
    pub(crate) unsafe fn launch_clusters<P>(
        &self,
        function: Function,
        (blocks, cluster): (u32, u32),
        threads: u32,
        shared_bytes: u32,
        params: &P,
    ) -> Result<(), BackendError> {
        let dimension = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: cluster, y: 1, z: 1 };
        let attribute = sys::CUlaunchAttribute_st {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue_union { clusterDim: dimension },
        };
        // SAFETY: by contract.
        unsafe {
            self.launch_with(&[attribute], self.stream, function, (blocks, 1), threads, shared_bytes, params)
        }
    }

    /// # Safety
    /// As for `launch`.
    pub(crate) unsafe fn launch_on<P>(
        &self,
        stream: Stream,
        function: Function,
        grid: (u32, u32),
        threads: u32,
        shared_bytes: u32,
        params: &P,
    ) -> Result<(), BackendError> {
        // SAFETY: by contract.
        unsafe { self.launch_with(&[], stream, function, grid, threads, shared_bytes, params) }
    }

    /// # Safety
    /// As for `launch`.
    #[allow(clippy::too_many_arguments)]
    unsafe fn launch_with<P>(
        &self,
        attributes: &[sys::CUlaunchAttribute_st],
        stream: Stream,
        function: Function,
        grid: (u32, u32),
        threads: u32,
        shared_bytes: u32,
        params: &P,
    ) -> Result<(), BackendError> {
        let overlap = sys::CUlaunchAttribute_st {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue_union { programmaticStreamSerializationAllowed: 1 },
        };
        let mut all = attributes.to_vec();
        all.extend(self.overlaps_launches.then_some(overlap));
        let config = sys::CUlaunchConfig_st {
            gridDimX: grid.0,
            gridDimY: grid.1,
            gridDimZ: 1,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared_bytes,
            hStream: stream.0,
            attrs: all.as_mut_ptr(),
            numAttrs: all.len() as u32,
        };
        let mut arguments = [ptr::from_ref(params).cast_mut().cast::<c_void>()];
        // SAFETY: the configuration and the argument list live through the call; the caller vouches for the rest.
        unsafe {
            sys::cuLaunchKernelEx(&raw const config, function.0, arguments.as_mut_ptr(), ptr::null_mut())
        }
        .result()
        .map_err(failed("launching a kernel"))
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if self.bind().is_ok() {
            self.stream.destroy();
        }
    }
}

/// How much the L2 asks memory for at a time: a line of 128 bytes, or two.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fetches {
    Lines,
    Pairs,
}

/// Of what the tensor cores multiply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    Bf16,
    Fp8,
}

/// Describes the matrix at an address for bulk copies of boxes of `box_rows` rows and 128 bytes of columns, whose rows are mixed as
/// the tensor cores want them. What a box has beyond the matrix is zero, and is not written.
pub(crate) fn map_matrix(
    address: u64,
    rows: usize,
    cols: usize,
    box_rows: u32,
    element: Element,
    fetches: Fetches,
) -> Result<TensorMap, BackendError> {
    use sys::CUtensorMapDataType as Type;
    let (kind, size) = match element {
        Element::Bf16 => (Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2),
        Element::Fp8 => (Type::CU_TENSOR_MAP_DATA_TYPE_UINT8, 1),
    };
    let (dims, strides) = ([cols as u64, rows as u64], [cols as u64 * size]);
    let (box_dims, steps) = ([128 / size as u32, box_rows], [1_u32; 2]);
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    // SAFETY: the arrays have as many numbers as the rank asks for; only the map is written.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            &raw mut map,
            kind,
            dims.len() as u32,
            address as *mut c_void,
            dims.as_ptr(),
            strides.as_ptr(),
            box_dims.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            match fetches {
                Fetches::Lines => sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                Fetches::Pairs => sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            },
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    }
    .result()
    .map_err(failed("describing a matrix"))?;
    Ok(TensorMap(map.opaque))
}

/// Describes tiles of packed weights for bulk copies of a record of some tiles, one behind the other. What is beyond is zero.
pub(crate) fn map_records(
    address: u64,
    tiles: usize,
    tile_bytes: usize,
    record_bytes: usize,
    box_tiles: u32,
) -> Result<TensorMap, BackendError> {
    let kind = sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT64;
    let (dims, strides) = ([tile_bytes as u64 / 8, tiles as u64], [tile_bytes as u64]);
    let (box_dims, steps) = ([record_bytes as u32 / 8, box_tiles], [1_u32; 2]);
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    // SAFETY: the arrays have as many numbers as the rank asks for; only the map is written.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            &raw mut map,
            kind,
            dims.len() as u32,
            address as *mut c_void,
            dims.as_ptr(),
            strides.as_ptr(),
            box_dims.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    }
    .result()
    .map_err(failed("describing packed weights"))?;
    Ok(TensorMap(map.opaque))
}

/// The same for bf16.
pub(crate) fn map_bf16(
    address: u64,
    rows: usize,
    cols: usize,
    box_rows: u32,
    fetches: Fetches,
) -> Result<TensorMap, BackendError> {
    map_matrix(address, rows, cols, box_rows, Element::Bf16, fetches)
}

/// A range of device memory.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    pointer: sys::CUdeviceptr,
    bytes: usize,
    context: Arc<CudaContext>,
}

impl DeviceMemory {
    /// Its address on the device.
    pub(crate) fn address(&self) -> u64 {
        self.pointer
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Starts filling it with zeros.
    pub(crate) fn clear(&self, gpu: &Gpu) -> Result<(), BackendError> {
        // SAFETY: the range is this allocation.
        unsafe { driver::memset_d8_async(self.pointer, 0, self.bytes, gpu.stream.0) }
            .map_err(failed("clearing memory"))
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: allocated by `Gpu::allocate`, freed here only; the driver waits for work that uses it.
            let _ = unsafe { driver::free_sync(self.pointer) };
        }
    }
}

/// A point in a stream that the host or another stream can wait for.
#[derive(Debug)]
pub(crate) struct Event(sys::CUevent);
// SAFETY: as for `Stream`.
unsafe impl Send for Event {}

impl Event {
    pub(crate) fn new() -> Result<Self, BackendError> {
        driver::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
            .map(Self)
            .map_err(failed("making an event"))
    }

    /// One that knows when it was reached.
    pub(crate) fn timed() -> Result<Self, BackendError> {
        driver::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)
            .map(Self)
            .map_err(failed("making an event"))
    }

    /// How long after another timed event it was reached; both must be.
    pub(crate) fn since(&self, earlier: &Self) -> Result<Duration, BackendError> {
        // SAFETY: both events are alive; the driver checks the rest.
        let milliseconds = unsafe { driver::event::elapsed(earlier.0, self.0) };
        milliseconds.map(from_milliseconds).map_err(failed("reading a timer"))
    }

    pub(crate) fn record(&self, gpu: &Gpu) -> Result<(), BackendError> {
        self.record_on(gpu.stream)
    }

    pub(crate) fn record_on(&self, stream: Stream) -> Result<(), BackendError> {
        // SAFETY: event and stream are alive.
        unsafe { driver::event::record(self.0, stream.0) }.map_err(failed("recording an event"))
    }

    pub(crate) fn is_done(&self) -> Result<bool, BackendError> {
        // SAFETY: the event is alive.
        match unsafe { driver::event::query(self.0) } {
            Ok(()) => Ok(true),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(failed("asking for an event")(error)),
        }
    }

    pub(crate) fn wait(&self) -> Result<(), BackendError> {
        // SAFETY: the event is alive.
        unsafe { driver::event::synchronize(self.0) }.map_err(failed("waiting for a step"))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed here only.
        let _ = unsafe { driver::event::destroy(self.0) };
    }
}

/// Measures how long work takes on the device.
#[derive(Debug)]
pub(crate) struct Timer {
    start: Event,
    end: Event,
}

impl Timer {
    pub(crate) fn new() -> Result<Self, BackendError> {
        Ok(Self { start: Event::timed()?, end: Event::timed()? })
    }

    pub(crate) fn start(&self, gpu: &Gpu) -> Result<(), BackendError> {
        self.start.record(gpu)
    }

    /// Milliseconds since `start`; waits for the work.
    pub(crate) fn stop(&self, gpu: &Gpu) -> Result<f32, BackendError> {
        self.end.record(gpu)?;
        self.end.wait()?;
        // SAFETY: both events are alive and recorded.
        unsafe { driver::event::elapsed(self.start.0, self.end.0) }.map_err(failed("reading a timer"))
    }
}
