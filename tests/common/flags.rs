//! Broadcasts without their safeguard, for controls.

use peerlane::launch::*;

/// Takes every flag without data out of a rank's table, and every wait for one.
pub fn without_flags(tables: &mut [pl_table]) {
    for t in tables {
        for p in 0..usize::from(t.phases) {
            let (send0, fold0) = (usize::from(t.phase[p].send0), usize::from(t.phase[p].fold0));
            let mut sends = t.send[send0..][..t.phase[p].sends.into()].to_vec();
            sends.retain(|s| u32::from(s.src) != PL_SRC_NOTHING);
            t.send[send0..][..sends.len()].copy_from_slice(&sends);
            t.phase[p].sends = sends.len() as u8;
            let mut folds = t.fold[fold0..][..t.phase[p].folds.into()].to_vec();
            folds.retain(|f| u32::from(f.dst) != PL_DST_AWAIT);
            t.fold[fold0..][..folds.len()].copy_from_slice(&folds);
            t.phase[p].folds = folds.len() as u8;
        }
        let folds = (0..usize::from(t.phases))
            .flat_map(|p| &t.fold[t.phase[p].fold0.into()..][..t.phase[p].folds.into()]);
        let remote = |f: &pl_fold| {
            let items = &t.item[f.item0.into()..][..f.items.into()];
            items.iter().filter(|i| u32::from(i.from) < PL_MAX_RANKS).count() as u8
        };
        let widest = folds.map(remote).max().unwrap_or(0);
        t.fan_in = widest;
    }
}
