//! Figures from batches: medians, because one disturbed batch must not move them.

/// The middle value; the mean of the two middle ones. NaN of nothing.
pub fn median(samples: &[f64]) -> f64 {
    let sorted = sorted(samples);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        odd if odd % 2 == 1 => sorted[middle],
        _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}

/// Half the distance between the quartiles, as a part of the median: 0.05 means that half of the
/// batches were within about 5 % of it. NaN of nothing.
pub fn spread(samples: &[f64]) -> f64 {
    let sorted = sorted(samples);
    (quantile(&sorted, 0.75) - quantile(&sorted, 0.25)) / 2.0 / median(samples)
}

fn sorted(samples: &[f64]) -> Vec<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// By linear interpolation between the two nearest values.
fn quantile(sorted: &[f64], part: f64) -> f64 {
    if sorted.is_empty() {
        return f64::NAN;
    }
    let position = part * (sorted.len() - 1) as f64;
    let (below, above) = (position.floor() as usize, position.ceil() as usize);
    sorted[below] + (sorted[above] - sorted[below]) * (position - below as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(&[3.0, 1.0, 100.0]), 3.0);
        assert_eq!(median(&[1.0, 2.0, 3.0, 100.0]), 2.5);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn spreads() {
        assert_eq!(spread(&[5.0, 5.0, 5.0]), 0.0);
        assert_eq!(spread(&[8.0, 9.0, 10.0, 11.0, 12.0]), 0.1);
        assert!(spread(&[]).is_nan());
    }
}
