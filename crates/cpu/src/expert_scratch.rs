//! Memory for mixtures of experts: the slots of a step in the order of their experts, and what products with them need.
//!
//! A slot is one expert of one token, `token * slots + slot`. Slots of one expert are neighbours once they are sorted, so that
//! its weights are read once for all of them.

use baton_backend::{BackendError, Handles, Op, Program};

use crate::buffers::{Buffer, Matrix};
use crate::memory::AlignedBytes;
use crate::quantize::{ActivationBlock, LANES, SuperPlaces};
use crate::weights::Weight;
use crate::weights::formats::{BLOCK, SPLIT_TOKENS};

/// Rows of an expert begin at a multiple of so many: whole groups of interleaved rows, and whole tiles of split ones.
pub const ROW_STEP: usize = if SPLIT_TOKENS > LANES { SPLIT_TOKENS } else { LANES };

/// A piece of work: some panels of an expert with some of its tokens.
#[derive(Clone, Copy, Debug)]
pub struct ExpertUnit {
    pub expert: u32,
    pub first_panel: u32,
    pub num_panels: u32,
    /// Of the expert's own rows.
    pub first_row: u32,
    pub num_rows: u32,
}

#[derive(Debug)]
pub struct ExpertScratch {
    /// First sorted row of each expert, and the number of all.
    pub first: Vec<u32>,
    /// The same in scratch, where each expert begins at a multiple of [`ROW_STEP`].
    pub padded: Vec<u32>,
    /// Slot and expert of each sorted row.
    pub slots: Vec<u32>,
    pub experts: Vec<u32>,
    /// Sorted row of each slot.
    pub rows: Vec<u32>,
    /// Experts with tokens, those with most first.
    pub used: Vec<u32>,
    pub units: Vec<ExpertUnit>,
    /// Products of a router, `[tokens, experts]`, or of experts, `[slots, hidden]`.
    pub products: Buffer,
    /// Activations for float weights and for quantised ones, `[padded rows, cols]`.
    pub floats: Buffer,
    blocks: AlignedBytes,
    supers: AlignedBytes,
}

impl ExpertScratch {
    pub fn new() -> Result<Self, BackendError> {
        let empty = || Buffer::new(0, 0, "scratch");
        Ok(Self {
            first: Vec::new(),
            padded: Vec::new(),
            slots: Vec::new(),
            experts: Vec::new(),
            rows: Vec::new(),
            used: Vec::new(),
            units: Vec::new(),
            products: empty()?,
            floats: empty()?,
            blocks: AlignedBytes::zeroed(0, "scratch")?,
            supers: AlignedBytes::zeroed(0, "scratch")?,
        })
    }

    pub fn blocks(&self) -> *mut ActivationBlock {
        self.blocks.as_mut_ptr().cast()
    }

    /// Rows of k-quants in super-blocks.
    pub fn supers(&self) -> *mut u8 {
        self.supers.as_mut_ptr()
    }

    /// Room for the largest step of a program.
    pub fn reserve(
        &mut self,
        program: &Program,
        handles: &Handles,
        weights: &[Weight],
        max_tokens: usize,
    ) -> Result<(), BackendError> {
        let what = "scratch for experts";
        let too_large = || BackendError::Unsupported { what: format!("{what}: it is too large") };
        let slots_of = |routing| handles.buffer(routing).map_or(0, |shape| shape.cols / 2);
        for op in &program.ops {
            let (weight, num_slots, is_linear) = match op {
                Op::Route(op) => {
                    let rows = handles.weight(op.weight).map_or(0, |weight| weight.rows);
                    self.products.reserve(max_tokens.checked_mul(rows).ok_or_else(too_large)?, what)?;
                    continue;
                }
                Op::ExpertGated(op) => (op.weight, slots_of(op.routing), false),
                Op::ExpertLinear(op) => (op.weight, slots_of(op.routing), true),
                Op::HeadLinear(op) => (op.weight, weights[op.weight.0 as usize].experts.len(), false),
                _ => continue,
            };
            let weight = &weights[weight.0 as usize];
            let rows = max_tokens.checked_mul(num_slots).ok_or_else(too_large)?;
            let padding = weight.experts.len().min(rows).saturating_mul(ROW_STEP);
            let padded = rows.checked_add(padding).ok_or_else(too_large)?;
            let values = padded.checked_mul(weight.cols).ok_or_else(too_large)?;
            if weight.experts.iter().any(|expert| expert.has_floats) {
                self.floats.reserve(values, what)?;
            }
            let bytes = (values.div_ceil(BLOCK)).checked_mul(size_of::<ActivationBlock>());
            let bytes = bytes.ok_or_else(too_large)?;
            let has_quants = weight.experts.iter().any(|expert| expert.has_quants);
            if has_quants && bytes > self.blocks.len() {
                self.blocks = AlignedBytes::zeroed(bytes, what)?;
            }
            let has_supers = weight.experts.iter().any(|expert| expert.has_supers);
            let bytes = SuperPlaces::bytes(padded, weight.cols).ok_or_else(too_large)?;
            if has_supers && bytes > self.supers.len() {
                self.supers = AlignedBytes::zeroed(bytes, what)?;
            }
            if is_linear {
                let height = weight.rows / weight.experts.len().max(1);
                self.products.reserve(rows.checked_mul(height).ok_or_else(too_large)?, what)?;
            }
            for list in [&mut self.slots, &mut self.experts, &mut self.rows] {
                list.reserve(rows.min(1 << 24));
            }
            self.first.reserve(weight.experts.len() + 1);
            self.padded.reserve(weight.experts.len());
            self.used.reserve(weight.experts.len());
            self.units.reserve(weight.experts.len().saturating_mul(64).min(1 << 20));
        }
        Ok(())
    }

    /// Sorts the slots of a step by their experts. False if a routing names an expert that there is not.
    pub fn sort(&mut self, routing: Matrix, num_tokens: usize, num_slots: usize, num_experts: usize) -> bool {
        let expert_of = |slot: usize| {
            // SAFETY: the routing has a row for each token, of twice as many values as it has slots.
            unsafe { *routing.row(slot / num_slots).add(slot % num_slots) as usize }
        };
        let count = num_tokens * num_slots;
        self.first.clear();
        self.first.resize(num_experts + 1, 0);
        for slot in 0..count {
            match self.first.get_mut(expert_of(slot).saturating_add(1)) {
                Some(counter) => *counter += 1,
                None => return false,
            }
        }
        self.padded.clear();
        self.used.clear();
        let (mut next, mut padded) = (0, 0);
        for expert in 0..num_experts {
            let rows = self.first[expert + 1];
            self.padded.push(padded);
            padded += rows.next_multiple_of(ROW_STEP as u32);
            if rows > 0 {
                self.used.push(expert as u32);
            }
            next += rows;
            self.first[expert + 1] = next;
        }
        for list in [&mut self.slots, &mut self.experts, &mut self.rows] {
            list.clear();
            list.resize(count, 0);
        }
        // `first` of an expert counts up to that of the next one, and is then put back.
        for slot in 0..count {
            let expert = expert_of(slot);
            let row = self.first[expert];
            self.first[expert] += 1;
            self.slots[row as usize] = slot as u32;
            self.experts[row as usize] = expert as u32;
            self.rows[slot] = row;
        }
        self.first.copy_within(0..num_experts, 1);
        self.first[0] = 0;
        let first = &self.first;
        let size = |expert: u32| first[expert as usize + 1] - first[expert as usize];
        self.used.sort_unstable_by_key(|&expert| (std::cmp::Reverse(size(expert)), expert));
        true
    }

    /// As [`Self::sort`] would where every token goes to all of `num_heads` experts, in their order.
    pub fn sort_heads(&mut self, num_tokens: usize, num_heads: usize) {
        let padded = num_tokens.next_multiple_of(ROW_STEP);
        for list in [
            &mut self.first,
            &mut self.padded,
            &mut self.used,
            &mut self.slots,
            &mut self.experts,
            &mut self.rows,
        ] {
            list.clear();
        }
        self.first.extend((0..=num_heads).map(|head| (head * num_tokens) as u32));
        self.padded.extend((0..num_heads).map(|head| (head * padded) as u32));
        self.used.extend(0..num_heads as u32);
        for head in 0..num_heads {
            self.slots.extend((0..num_tokens).map(|token| (token * num_heads + head) as u32));
            self.experts.extend((0..num_tokens).map(|_| head as u32));
        }
    }

    /// Rows of an expert.
    pub fn num_rows(&self, expert: usize) -> usize {
        (self.first[expert + 1] - self.first[expert]) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_sorted_by_expert() {
        let mut scratch = ExpertScratch::new().expect("makes");
        // Three tokens of two experts each, with weights after them.
        let values = [4.0, 1.0, 0.5, 0.5, 1.0, 0.0, 0.5, 0.5, 1.0, 4.0, 0.5, 0.5];
        let buffer = Buffer::from_values(&values).expect("makes");
        let routing = buffer.matrix().reshaped(3, 4).expect("fits");
        assert!(scratch.sort(routing, 3, 2, 5));
        assert_eq!(scratch.first, [0, 1, 4, 4, 4, 6]);
        assert_eq!(scratch.slots, [3, 1, 2, 4, 0, 5]);
        assert_eq!(scratch.experts, [0, 1, 1, 1, 4, 4]);
        assert_eq!(scratch.rows, [4, 1, 2, 0, 3, 5]);
        assert_eq!(scratch.used, [1, 4, 0]);
        let step = ROW_STEP as u32;
        assert_eq!(scratch.padded, [0, step, 2 * step, 2 * step, 2 * step]);
        assert!(!scratch.sort(routing, 3, 2, 4));
    }
}
