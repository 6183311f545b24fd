//! Means and percentiles, by numpy's definitions, so that figures agree with those of other tools.

/// Percentile `p` (0 to 100) of sorted values, linear between the two nearest; 0 where there are none.
pub fn percentile(sorted: &[f64], p: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let rank = (p / 100.0).clamp(0.0, 1.0) * last as f64;
    let below = rank.floor() as usize;
    let above = (below + 1).min(last);
    sorted[below] + (sorted[above] - sorted[below]) * (rank - below as f64)
}

pub fn mean(values: &[f64]) -> f64 {
    if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / values.len() as f64 }
}

/// A set of measurements of the same thing.
#[derive(Clone, Debug, Default)]
pub struct Distribution {
    sorted: Vec<f64>,
}

impl Distribution {
    pub fn new(mut values: Vec<f64>) -> Self {
        values.sort_unstable_by(f64::total_cmp);
        Self { sorted: values }
    }

    pub fn len(&self) -> usize {
        self.sorted.len()
    }

    pub fn is_empty(&self) -> bool {
        self.sorted.is_empty()
    }

    pub fn sorted(&self) -> &[f64] {
        &self.sorted
    }

    pub fn mean(&self) -> f64 {
        mean(&self.sorted)
    }

    pub fn median(&self) -> f64 {
        self.percentile(50.0)
    }

    pub fn percentile(&self, p: f64) -> f64 {
        percentile(&self.sorted, p)
    }

    /// Of the population, as numpy's `std`.
    pub fn standard_deviation(&self) -> f64 {
        let mean = self.mean();
        mean_of(self.sorted.iter().map(|value| (value - mean).powi(2)), self.sorted.len()).sqrt()
    }
}

fn mean_of(values: impl Iterator<Item = f64>, count: usize) -> f64 {
    if count == 0 { 0.0 } else { values.sum::<f64>() / count as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(found: f64, expect: f64) {
        assert!((found - expect).abs() < 1e-9 * expect.abs().max(1.0), "{found} is not {expect}");
    }

    #[test]
    fn figures_are_those_of_numpy() {
        // np.percentile([15, 20, 35, 40, 50], [0, 5, 30, 40, 50, 99, 100]), np.std, np.mean
        let values = Distribution::new(vec![40.0, 15.0, 50.0, 20.0, 35.0]);
        for (p, expect) in
            [(0.0, 15.0), (5.0, 16.0), (30.0, 23.0), (40.0, 29.0), (50.0, 35.0), (99.0, 49.6), (100.0, 50.0)]
        {
            close(values.percentile(p), expect);
        }
        close(values.mean(), 32.0);
        close(values.standard_deviation(), 12.884_098_726_725_126);
        // np.percentile([1, 2, 3, 4], [25, 50, 90]) = [1.75, 2.5, 3.7]
        let even = Distribution::new(vec![4.0, 3.0, 2.0, 1.0]);
        close(even.percentile(25.0), 1.75);
        close(even.median(), 2.5);
        close(even.percentile(90.0), 3.7);
    }

    #[test]
    fn nothing_and_one_value_have_figures_too() {
        let nothing = Distribution::default();
        assert_eq!((nothing.mean(), nothing.median(), nothing.standard_deviation()), (0.0, 0.0, 0.0));
        let one = Distribution::new(vec![3.0]);
        assert_eq!((one.mean(), one.percentile(99.0), one.standard_deviation()), (3.0, 3.0, 0.0));
    }
}
