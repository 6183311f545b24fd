//! Random numbers for workloads: the same seed gives the same load on every machine.

/// `SplitMix64`: small, quick, and good enough for lengths, arrivals and token ids.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// In `[0, 1)`.
    pub fn uniform(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// In `[0, limit)`; the limit must not be 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        // The high half of a 128-bit product: the bias is below 2⁻³² for every limit we use.
        ((u128::from(self.next_u64()) * u128::from(limit)) >> 64) as u64
    }

    /// In `[low, high]`.
    pub fn between(&mut self, low: usize, high: usize) -> usize {
        low + self.below((high - low) as u64 + 1) as usize
    }

    fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }

    /// The gamma distribution with scale 1, by Marsaglia and Tsang's rejection. Shape 1 is the exponential one.
    pub fn gamma(&mut self, shape: f64) -> f64 {
        if shape < 1.0 {
            // A draw of shape + 1, shrunk.
            let shrink = (1.0 - self.uniform()).powf(1.0 / shape);
            return self.gamma(shape + 1.0) * shrink;
        }
        let d = shape - 1.0 / 3.0;
        let c = 1.0 / (9.0 * d).sqrt();
        loop {
            let x = self.normal();
            let v = (1.0 + c * x).powi(3);
            if v > 0.0 && (1.0 - self.uniform()).ln() < 0.5 * x * x + d * (1.0 - v + v.ln()) {
                return d * v;
            }
        }
    }

    /// An order of all items that the seed decides.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last as u64 + 1) as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seed_decides() {
        let draw =
            |seed| (0..4).map(|_| 0).scan(Random::new(seed), |r, _| Some(r.next_u64())).collect::<Vec<_>>();
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
    }

    #[test]
    fn gamma_has_its_mean_and_variance() {
        for shape in [0.25, 1.0, 4.0] {
            let mut random = Random::new(1);
            let draws: Vec<f64> = (0..100_000).map(|_| random.gamma(shape)).collect();
            let mean = draws.iter().sum::<f64>() / draws.len() as f64;
            let variance = draws.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / draws.len() as f64;
            assert!((mean / shape - 1.0).abs() < 0.03, "shape {shape}: mean {mean}");
            assert!((variance / shape - 1.0).abs() < 0.06, "shape {shape}: variance {variance}");
        }
    }

    #[test]
    fn bounds_are_kept_and_reached() {
        let mut random = Random::new(2);
        let draws: Vec<usize> = (0..1000).map(|_| random.between(3, 5)).collect();
        assert_eq!((draws.iter().min(), draws.iter().max()), (Some(&3), Some(&5)));
        let mut items: Vec<u32> = (0..50).collect();
        random.shuffle(&mut items);
        assert_ne!(items, (0..50).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..50).collect::<Vec<_>>());
    }
}
