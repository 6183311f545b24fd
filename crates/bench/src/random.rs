//! Random arrivals for workloads: the same seed gives the same load on every machine.

pub use baton_core::random::Random;

fn normal(random: &mut Random) -> f64 {
    let radius = (-2.0 * (1.0 - random.uniform()).ln()).sqrt();
    radius * (std::f64::consts::TAU * random.uniform()).cos()
}

/// The gamma distribution with scale 1, by Marsaglia and Tsang's rejection. Shape 1 is the exponential one.
pub fn gamma(random: &mut Random, shape: f64) -> f64 {
    if shape < 1.0 {
        // A draw of shape + 1, shrunk.
        let shrink = (1.0 - random.uniform()).powf(1.0 / shape);
        return gamma(random, shape + 1.0) * shrink;
    }
    let d = shape - 1.0 / 3.0;
    let c = 1.0 / (9.0 * d).sqrt();
    loop {
        let x = normal(random);
        let v = (1.0 + c * x).powi(3);
        if v > 0.0 && (1.0 - random.uniform()).ln() < 0.5 * x * x + d * (1.0 - v + v.ln()) {
            return d * v;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gamma_has_its_mean_and_variance() {
        for shape in [0.25, 1.0, 4.0] {
            let mut random = Random::new(1);
            let draws: Vec<f64> = (0..100_000).map(|_| gamma(&mut random, shape)).collect();
            let mean = draws.iter().sum::<f64>() / draws.len() as f64;
            let variance = draws.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / draws.len() as f64;
            assert!((mean / shape - 1.0).abs() < 0.03, "shape {shape}: mean {mean}");
            assert!((variance / shape - 1.0).abs() < 0.06, "shape {shape}: variance {variance}");
        }
    }
}
