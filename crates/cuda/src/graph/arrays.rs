//! The arrays of a step's tasks, side by side in one pinned buffer that one copy brings to the device.

use std::collections::HashMap;

use baton_backend::BackendError;
use baton_backend::graph::RowMap;

use crate::gpu::{DeviceMemory, Gpu};
use crate::pinned::PinnedMemory;

/// Where an array begins, in words.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Place(usize);

#[derive(Debug)]
pub(super) struct Arrays {
    /// The words that are in use of `pinned`.
    len: usize,
    /// Arrays that are there already, by address and length: tasks of one graph share pages and scales.
    known: HashMap<(usize, usize), Place>,
    pinned: PinnedMemory,
    device: DeviceMemory,
}

impl Arrays {
    pub(super) fn new(gpu: &Gpu) -> Result<Self, BackendError> {
        Ok(Self {
            len: 0,
            known: HashMap::new(),
            pinned: gpu.allocate_pinned(1 << 20, "arrays of graph tasks")?,
            device: gpu.allocate(1 << 20, "arrays of graph tasks")?,
        })
    }

    pub(super) fn clear(&mut self) {
        self.len = 0;
        self.known.clear();
    }

    pub(super) fn words(&mut self, gpu: &Gpu, values: &[u32]) -> Result<Place, BackendError> {
        self.put(gpu, (values.as_ptr() as usize, values.len()), |words| words.copy_from_slice(values))
    }

    pub(super) fn floats(&mut self, gpu: &Gpu, values: &[f32]) -> Result<Place, BackendError> {
        self.put(gpu, (values.as_ptr() as usize, values.len()), |words| {
            for (word, value) in words.iter_mut().zip(values) {
                *word = value.to_bits();
            }
        })
    }

    /// Writes an array that is not there yet behind the others.
    fn put(
        &mut self,
        gpu: &Gpu,
        key: (usize, usize),
        write: impl FnOnce(&mut [u32]),
    ) -> Result<Place, BackendError> {
        if let Some(place) = self.known.get(&key) {
            return Ok(*place);
        }
        let (first, end) = (self.len, self.len + key.1);
        if 4 * end > self.pinned.bytes() {
            let mut larger = gpu.allocate_pinned((4 * end).next_power_of_two(), "arrays of graph tasks")?;
            larger.words_mut()[..first].copy_from_slice(&self.pinned.words()[..first]);
            self.pinned = larger;
        }
        write(&mut self.pinned.words_mut()[first..end]);
        // Arrays begin at multiples of 16 bytes.
        self.len = end.next_multiple_of(4);
        self.known.insert(key, Place(first));
        Ok(Place(first))
    }

    pub(super) fn pages(&mut self, gpu: &Gpu, map: &RowMap<'_>) -> Result<Option<Place>, BackendError> {
        match map {
            RowMap::Identity => Ok(None),
            RowMap::Pages { pages, .. } => self.words(gpu, pages).map(Some),
        }
    }

    /// Starts the copy, on the stream of the tasks.
    pub(super) fn upload(&mut self, gpu: &Gpu) -> Result<(), BackendError> {
        // A last array need not fill its multiple of 16 bytes.
        let bytes = (4 * self.len).min(self.pinned.bytes());
        if bytes > self.device.bytes() {
            self.device = gpu.allocate(bytes.next_power_of_two(), "arrays of graph tasks")?;
        }
        gpu.upload(&self.pinned, &self.device, 0, bytes)
    }

    pub(super) fn address(&self, place: Place) -> u64 {
        self.device.address() + 4 * place.0 as u64
    }
}
