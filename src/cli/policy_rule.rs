//! Which `[[policy]]` rule applies to a user, by the host's user database, which may be slow.

use std::ffi::CString;

use nix::unistd::{Gid, Group, Uid, User, getgrouplist};

use sublet_core::config::{Config, PolicyRule};
use sublet_core::text::safe;

/// The entries of the user database about a user.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Known {
    name: Option<String>,
    gids: Vec<u32>,
}

/// The first rule that names `uid` or one of its groups.
///
/// # Errors
/// No rule applies; the message is one line with the rule to add.
pub(crate) fn rule_of(uid: u32, config: &Config) -> Result<&PolicyRule, String> {
    let known = known(uid);
    let group = |name: &str| Group::from_name(name).ok().flatten().map(|group| group.gid.as_raw());
    let found = config.policy.iter().find(|rule| fits(rule, uid, &known, &group));
    found.ok_or_else(|| missing(uid, known.name.as_deref()))
}

fn known(uid: u32) -> Known {
    let Ok(Some(user)) = User::from_uid(Uid::from_raw(uid)) else { return Known::default() };
    let gids = CString::new(user.name.as_str())
        .map(|name| getgrouplist(&name, user.gid).unwrap_or_else(|_| vec![user.gid]))
        .unwrap_or_default();
    Known { name: Some(user.name), gids: gids.into_iter().map(Gid::as_raw).collect() }
}

fn fits(rule: &PolicyRule, uid: u32, known: &Known, gid_of: &dyn Fn(&str) -> Option<u32>) -> bool {
    if let Some(user) = &rule.user {
        let named = known.name.as_deref() == Some(user.as_str());
        // Ids that users get from /etc/subuid are not users.
        return named || user.parse() == Ok(uid) || user == "*" && known.name.is_some();
    }
    let gid = |group: &String| group.parse().ok().or_else(|| gid_of(group));
    rule.group.as_ref().and_then(gid).is_some_and(|gid| known.gids.contains(&gid))
}

fn missing(uid: u32, name: Option<&str>) -> String {
    let (who, value) = match name {
        Some(name) => (format!("user {} (uid {uid})", safe(name)), format!("\"{}\"", safe(name))),
        None => (format!("uid {uid}"), uid.to_string()),
    };
    format!(
        "{who} has no [[policy]] on this host: root allows GPU shares with a file in /etc/sublet/conf.d that \
         has the line: policy = [{{ user = {value}, leases = 1 }}]"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(name: &str) -> PolicyRule {
        PolicyRule { user: Some(name.into()), ..PolicyRule::default() }
    }

    fn group(name: &str) -> PolicyRule {
        PolicyRule { group: Some(name.into()), ..PolicyRule::default() }
    }

    #[test]
    fn rules_name_users_and_groups_by_name_and_number() {
        let alice = Known { name: Some("alice".into()), gids: vec![1000, 44] };
        let gid_of = |name: &str| (name == "video").then_some(44);
        let cases = [
            (user("alice"), true),
            (user("1000"), true),
            (user("*"), true),
            (user("bob"), false),
            (user("1001"), false),
            (group("video"), true),
            (group("44"), true),
            (group("audio"), false),
            (group("*"), false),
        ];
        for (rule, expected) in cases {
            assert_eq!(fits(&rule, 1000, &alice, &gid_of), expected, "{rule:?}");
        }
        assert!(!fits(&user("*"), 100_999, &Known::default(), &gid_of), "a subordinate id is no user");
        assert!(fits(&user("100999"), 100_999, &Known::default(), &gid_of));
    }

    #[test]
    fn the_first_rule_that_fits_counts() {
        let mut config =
            Config { policy: vec![user("4294967294"), user("0"), user("*")], ..Config::default() };
        assert_eq!(rule_of(0, &config).unwrap().user.as_deref(), Some("0"));
        config.policy.clear();
        assert_eq!(
            rule_of(4_000_000_000, &config).unwrap_err(),
            "uid 4000000000 has no [[policy]] on this host: root allows GPU shares with a file in \
             /etc/sublet/conf.d that has the line: policy = [{ user = 4000000000, leases = 1 }]"
        );
    }

    #[test]
    fn the_line_to_add_is_a_configuration() {
        let line = missing(7, Some("alice"));
        let toml = line.rsplit_once("the line: ").unwrap().1;
        assert_eq!(toml, "policy = [{ user = \"alice\", leases = 1 }]");
        let config: Config = toml::from_str(toml).unwrap();
        assert_eq!(config.policy[0].leases, Some(1));
    }
}
