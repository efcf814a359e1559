//! What the driver tells of one GPU's health when it is asked, and what that means.

use std::mem::MaybeUninit;

use nvml_wrapper::Device;
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::error::{nvml_sym, nvml_try};
use nvml_wrapper::struct_wrappers::device::FieldValueSample;
use nvml_wrapper_sys::bindings::{NVML_NVLINK_MAX_LINKS, field_id, nvmlFieldValue_t};

use crate::probe::{Fabric, fabric};
use crate::sick_gpus::xid::{Remedy, describe_recovery, is_fault};

/// What is asked about a GPU; behind its own state come the errors on all its `NVLinks`, which GPUs up to Ampere count.
const OF_GPU: [u32; 6] = [
    field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION,
    field_id::NVML_FI_DEV_REMAPPED_FAILURE,
    field_id::NVML_FI_DEV_REMAPPED_PENDING,
    field_id::NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
    field_id::NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
    field_id::NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
];

/// What is asked about each link: Hopper has these in place of the errors on all (NVML's change log, 525; seen on two H200s, driver
/// 580.159.04: docs/evidence). Blackwell has neither (the change log, 565).
const OF_LINK: [u32; 3] = [
    field_id::NVML_FI_DEV_NVLINK_ERROR_DL_CRC,
    field_id::NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY,
    field_id::NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY,
];

/// The answers. A question that the driver does not answer counts as if all were well.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct GpuState {
    /// `nvmlDeviceGpuRecoveryAction_s`; `None`: a driver before 565 does not tell.
    recovery: Option<u64>,
    /// `None`: the driver does not tell.
    remap_pending: Option<bool>,
    remap_failed: bool,
    is_hot: bool,
    lacks_power: bool,
    /// Errors on `NVLinks` since the driver was loaded: how many answers there were, and their sum. Of other links the sum is
    /// another, so it is compared only where as many answered.
    link_errors: (usize, u64),
    fabric: Option<Fabric>,
}

impl GpuState {
    /// Asks for it.
    pub fn of(device: &Device<'_>) -> Self {
        let slow = device.current_throttle_reasons().unwrap_or(ThrottleReasons::NONE);
        let heat = ThrottleReasons::HW_THERMAL_SLOWDOWN | ThrottleReasons::SW_THERMAL_SLOWDOWN;
        Self {
            is_hot: slow.intersects(heat),
            lacks_power: slow.contains(ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN),
            fabric: fabric(device),
            ..Self::by_answers(fields(device).into_iter().flatten())
        }
    }

    /// By the answers of [`fields`].
    fn by_answers(mut numbers: impl Iterator<Item = Option<u64>>) -> Self {
        let [recovery, failed, pending] = [(); 3].map(|()| numbers.next().flatten());
        Self {
            recovery,
            remap_failed: failed.is_some_and(|failed| failed > 0),
            remap_pending: pending.map(|pending| pending > 0),
            link_errors: numbers
                .flatten()
                .fold((0_usize, 0_u64), |(answers, sum), errors| (answers + 1, sum.saturating_add(errors))),
            ..Self::default()
        }
    }

    /// A fault that keeps new leases away, what to do, and whether the driver asks for a reset.
    pub fn fault(&self) -> Option<(&'static str, Remedy, bool)> {
        let action = self.recovery.filter(|action| is_fault(*action));
        let (what, remedy) = describe_recovery(action.unwrap_or_default());
        let is_pending = self.remap_pending == Some(true);
        let is_apart = self.fabric == Some(Fabric::Failed);
        let all = [
            (action.is_some(), what, remedy, true),
            (self.remap_failed, "a faulty row of its memory cannot be replaced", Remedy::Repair, false),
            (is_pending, "a faulty row of its memory is replaced at a reset", Remedy::ResetLater, true),
            (is_apart, "it could not join its NVLink fabric", Remedy::Repair, false),
        ];
        all.into_iter().find(|(is_so, ..)| *is_so).map(|(_, what, remedy, asks)| (what, remedy, asks))
    }

    /// Whether the driver says that it needs no reset. A GPU that does not answer at all has not been reset.
    pub fn needs_no_reset(&self) -> bool {
        let answers = self.recovery.is_some() || self.remap_pending.is_some();
        answers && self.recovery.is_none_or(|action| !is_fault(action)) && self.remap_pending != Some(true)
    }

    /// What is amiss with a GPU that is served, in a word and in a line. `before` is its last state.
    pub fn warnings(&self, before: Option<Self>) -> Vec<(&'static str, &'static str)> {
        let (answers, errors) = self.link_errors;
        let has_errors =
            before.is_some_and(|before| before.link_errors.0 == answers && before.link_errors.1 < errors);
        let joins = self.fabric == Some(Fabric::Joining);
        let all = [
            (self.is_hot, ("hot", "it is slowed down, because it is too hot; see its cooling")),
            (self.lacks_power, ("power", "it is slowed down by the host's power supply")),
            (has_errors, ("nvlink", "its NVLinks have errors; `nvidia-smi nvlink -e` counts them")),
            (joins, ("fabric", "it has not joined its NVLink fabric yet; see nvidia-fabricmanager")),
        ];
        all.into_iter().filter(|(is_so, _)| *is_so).map(|(_, what)| what).collect()
    }
}

/// The values of [`OF_GPU`] and, link by link, of [`OF_LINK`]: each is answered by itself, a link that there is not by no number.
/// One call asks all, by structs of NVML's own: nvml-wrapper's lack the scope, which is the link's number.
#[allow(unsafe_code, reason = "NVML by its C ABI")]
fn fields(device: &Device<'_>) -> Option<Vec<Option<u64>>> {
    let call = nvml_sym(device.nvml().lib().nvmlDeviceGetFieldValues.as_ref()).ok()?;
    let of_links = (0..NVML_NVLINK_MAX_LINKS).flat_map(|link| OF_LINK.map(|id| (id, link)));
    // SAFETY: a struct of numbers, for which zeros are valid.
    let empty: nvmlFieldValue_t = unsafe { MaybeUninit::zeroed().assume_init() };
    let ask = |(id, scope)| nvmlFieldValue_t { fieldId: id, scopeId: scope, ..empty };
    let mut fields: Vec<_> = OF_GPU.map(|id| (id, 0)).into_iter().chain(of_links).map(ask).collect();
    // SAFETY: the handle is valid as long as the device, and NVML writes as many such structs as it is told of.
    nvml_try(unsafe { call(device.handle(), fields.len().try_into().ok()?, fields.as_mut_ptr()) }).ok()?;
    let number = |field| match FieldValueSample::try_from(field).ok()?.value {
        Ok(SampleValue::U32(number)) => Some(number.into()),
        Ok(SampleValue::U64(number)) => Some(number),
        _ => None,
    };
    Some(fields.into_iter().map(number).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reset_that_the_driver_wants_is_a_fault_and_heat_is_none() {
        let asked = GpuState { recovery: Some(1), ..GpuState::default() };
        assert_eq!(asked.fault(), Some(("the driver asks for a reset", Remedy::Reset, true)));
        let pending = GpuState { recovery: Some(0), remap_pending: Some(true), ..GpuState::default() };
        assert!(pending.fault().is_some_and(|(_, remedy, asks)| asks && remedy == Remedy::ResetLater));
        assert!(!asked.needs_no_reset() && !pending.needs_no_reset());
        assert!(!GpuState::default().needs_no_reset(), "it does not answer");
        let old_driver = GpuState { remap_pending: Some(false), ..GpuState::default() };
        assert!(old_driver.needs_no_reset() && GpuState { recovery: Some(0), ..asked }.needs_no_reset());
        assert!(
            GpuState { recovery: Some(3), ..asked }.needs_no_reset(),
            "only traffic between GPUs is to end"
        );
        let hot = GpuState { is_hot: true, recovery: Some(3), ..GpuState::default() };
        assert_eq!((hot.fault(), hot.warnings(None).len()), (None, 1));
        let short = GpuState { lacks_power: true, ..GpuState::default() };
        assert_eq!((short.fault(), short.warnings(None)[0].0), (None, "power"));
        let failed = GpuState { remap_failed: true, remap_pending: Some(true), ..GpuState::default() };
        let what = "a faulty row of its memory cannot be replaced";
        assert_eq!(failed.fault(), Some((what, Remedy::Repair, false)));
    }

    #[test]
    fn every_recovery_that_the_driver_asks_for_is_a_fault() {
        let remedy = |action| {
            let state = GpuState { recovery: Some(action), ..GpuState::default() };
            state.fault().map(|(_, remedy, asks)| (remedy, asks))
        };
        let asked = |remedy| Some((remedy, true));
        assert_eq!([0, 3].map(remedy), [None; 2]);
        assert_eq!([1, 4].map(remedy), [asked(Remedy::Reset), asked(Remedy::ResetLater)]);
        assert_eq!([2, 7].map(remedy), [asked(Remedy::Reboot); 2]);
        assert_eq!([5, 6, 99].map(remedy), [asked(Remedy::LookUp); 3]);
    }

    #[test]
    fn link_errors_are_the_sum_of_all_that_answers() {
        let with = |errors: &[Option<u64>]| {
            let state = [Some(4), Some(0), Some(1)];
            GpuState::by_answers(state.into_iter().chain(errors.iter().copied()))
        };
        let expected = |link_errors| GpuState {
            recovery: Some(4),
            remap_pending: Some(true),
            link_errors,
            ..GpuState::default()
        };
        assert_eq!(with(&[None; 57]), expected((0, 0)));
        assert_eq!(with(&[Some(5), Some(6), Some(7), None]), expected((3, 18)), "as Ampere tells it");
        let hopper = [&[None; 3][..], &[Some(0); 51], &[Some(1), None, Some(2)]].concat();
        assert_eq!(with(&hopper), expected((53, 3)));
        assert_eq!(with(&[Some(u64::MAX), Some(1)]), expected((2, u64::MAX)));
        assert_eq!(GpuState::by_answers([].into_iter()), GpuState::default(), "the driver does not answer");
    }

    #[test]
    fn link_errors_count_as_long_as_the_same_answers_grow() {
        let with = |errors| GpuState { link_errors: (54, errors), ..GpuState::default() };
        assert_eq!(with(5).warnings(None).len(), 0, "they may be old");
        assert_eq!(with(5).warnings(Some(with(5))).len(), 0);
        assert_eq!(with(6).warnings(Some(with(5))).len(), 1);
        let failed = GpuState::by_answers([].into_iter());
        assert_eq!(with(6).warnings(Some(failed)).len(), 0, "an answer that failed is no zero");
        let fewer = GpuState { link_errors: (53, 5), ..failed };
        assert_eq!(with(6).warnings(Some(fewer)).len(), 0, "it has another link's errors, too");
        assert_eq!(fewer.warnings(Some(with(6))).len(), 0);
    }
}
