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

/// The Mann-Whitney U test, exact and two-sided: how often chance alone makes two samples of one
/// distribution differ in rank at least as much as these. 1 of nothing.
///
/// Ours, because statrs 0.19 answers 1 for samples of equal size that do not overlap at all.
pub fn mann_whitney(a: &[f64], b: &[f64]) -> f64 {
    let wins = |x: f64, y: f64| if x < y { 1.0 } else { f64::from(u8::from(x == y)) / 2.0 };
    let u: f64 = a.iter().flat_map(|x| b.iter().map(move |y| wins(*x, *y))).sum();
    let pairs = (a.len() * b.len()) as f64;
    let extreme = u.max(pairs - u).ceil() as usize;
    let ways = ways(a.len(), b.len());
    let as_extreme: f64 = ways.iter().skip(extreme).sum();
    (2.0 * as_extreme / ways.iter().sum::<f64>()).min(1.0)
}

/// How many of the orders of `a` and `b` things give each value of U: the coefficients of the
/// Gaussian binomial, the product of (1 - q^(b+i)) / (1 - q^i) over i from 1 to a.
fn ways(a: usize, b: usize) -> Vec<f64> {
    let mut ways = vec![0.0; a * b + 1];
    ways[0] = 1.0;
    for i in 1..=a {
        for u in (b + i..ways.len()).rev() {
            ways[u] -= ways[u - b - i];
        }
        for u in i..ways.len() {
            ways[u] += ways[u - i];
        }
    }
    ways
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
    fn chances_are_those_of_the_tables() {
        assert_eq!(ways(2, 2), [1.0, 1.0, 2.0, 1.0, 1.0]);
        assert_eq!(ways(5, 5).iter().sum::<f64>(), 252.0);
        let (low, high) = ([1.0, 2.0, 3.0, 4.0, 5.0], [6.0, 7.0, 8.0, 9.0, 10.0]);
        assert_eq!(mann_whitney(&low, &high), 2.0 / 252.0, "only one order each way is as extreme");
        assert_eq!(mann_whitney(&high, &low), 2.0 / 252.0);
        assert_eq!(mann_whitney(&low, &low), 1.0);
        // Males 19 22 16 29 24, females 20 11 17 12: U = 17, p = 0.111 (SciPy's example).
        let p = mann_whitney(&[19.0, 22.0, 16.0, 29.0, 24.0], &[20.0, 11.0, 17.0, 12.0]);
        assert!((p - 0.1111).abs() < 0.001, "{p}");
        assert_eq!(mann_whitney(&[], &low), 1.0);
    }

    #[test]
    fn spreads() {
        assert_eq!(spread(&[5.0, 5.0, 5.0]), 0.0);
        assert_eq!(spread(&[8.0, 9.0, 10.0, 11.0, 12.0]), 0.1);
        assert!(spread(&[]).is_nan());
    }
}
