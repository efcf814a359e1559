//! The pages against the parsers of what they describe.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use sublet_core::config::Config;
use sublet_core::config_files::{of_text, parse_containers};
use sublet_core::request;

use super::*;

fn page(name: &str) -> &'static Page {
    PAGES.iter().find(|page| page.name == name).unwrap()
}

/// The words in backticks.
fn code(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// The keys that a page describes, each behind the name of its table and a dot; and the tables.
fn described(page: &Page) -> BTreeSet<String> {
    let (mut table, mut keys) = (String::new(), BTreeSet::new());
    for block in page.blocks().unwrap() {
        match block {
            Block::Subsection(name) => {
                name.trim_matches(['[', ']']).clone_into(&mut table);
                keys.insert(table.clone());
                table.push('.');
            }
            Block::Term { words, .. } => {
                let key = |word: &String| code(word).next().map(|key| format!("{table}{key}"));
                // Files have terms, too.
                keys.extend(words.iter().filter_map(key).filter(|key| !key.starts_with('/')));
            }
            _ => {}
        }
    }
    keys
}

/// The blocks of code behind the heading Examples.
fn examples(page: &Page) -> Vec<String> {
    let blocks = page.blocks().unwrap().into_iter();
    let examples = blocks.skip_while(|block| *block != Block::Section("Examples".to_owned()));
    let text_of_code = |block| if let Block::Code(lines) = block { Some(lines.join("\n")) } else { None };
    let examples: Vec<String> = examples.filter_map(text_of_code).collect();
    assert!(examples.len() > 2, "{}", page.name);
    examples
}

/// The keys that the refusal of the unknown key `zzz` lists; `None` for another refusal.
fn expected(refusal: &str) -> Option<BTreeSet<String>> {
    let listed = refusal.split_once("unknown key `zzz`; why: expected")?.1;
    Some(code(listed).map(str::to_owned).collect())
}

/// Every key that a file may have, as [`described`] names them: those of tables behind the table's name.
fn accepted(refusal: impl Fn(&str) -> String) -> BTreeSet<String> {
    let mut keys = expected(&refusal("zzz = 1\n")).unwrap();
    for table in keys.clone() {
        let headers = [format!("[{table}]"), format!("[[{table}]]")];
        let inner = headers.iter().find_map(|header| expected(&refusal(&format!("{header}\nzzz = 1\n"))));
        keys.extend(inner.into_iter().flatten().map(|key| format!("{table}.{key}")));
    }
    keys
}

/// The annotations that the parser accepts, as its refusal lists them, and the keys that only a share may have.
fn keys_of_requests(refusal: &str) -> BTreeSet<String> {
    let listed = refusal.split_once("unknown key; why: the keys are ").unwrap().1;
    listed.split([',', ';']).map(|key| key.trim().to_owned()).collect()
}

/// What the parser says of the annotations, on a host with a share `small` where everything is allowed.
fn refusal_of<'a>(annotations: impl IntoIterator<Item = (&'a str, &'a str)>) -> Option<String> {
    let config =
        of_text("[mig]\nallow_caps = [\"monitor\", \"config\"]\n[share.small]\nsm = 25\nmemory = \"8GiB\"\n");
    let annotations: BTreeMap<String, String> =
        annotations.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
    let request = request::parse(&annotations, None, None, &config.0.unwrap());
    request.err().map(|error| error.to_string())
}

#[test]
fn the_page_of_annotations_describes_each_that_there_is() {
    let accepted = keys_of_requests(&refusal_of([("sublet.zzz", "1")]).unwrap());
    assert!(accepted.len() > 12, "{accepted:?}");
    assert_eq!(described(page("sublet-annotations")), accepted);
}

#[test]
fn the_values_that_it_lists_are_accepted() {
    let mut tried = 0;
    for block in page("sublet-annotations").blocks().unwrap() {
        let Block::Term { words, meaning } = block else { continue };
        // The engines of another table.
        let Some(key) = code(&words[0]).next() else { continue };
        let is_value = |word: &&str| !word.contains(['…', '<']) && *word != "G:M";
        for value in code(&meaning[0]).filter(is_value) {
            assert_eq!(refusal_of([(key, value)]), None);
            tried += 1;
        }
    }
    assert!(tried > 30, "{tried}");
}

#[test]
fn the_page_of_the_configuration_describes_each_key_that_there_is() {
    let refusal = |text: &str| of_text(text).0.unwrap_err().to_string();
    let mut accepted = accepted(refusal);
    // The annotations are described in their own page.
    let of_shares = keys_of_requests(&refusal("[share.x]\nzzz = 1\n"));
    accepted
        .extend(of_shares.iter().filter(|key| !key.starts_with("sublet.")).map(|key| format!("share.{key}")));
    assert!(accepted.len() > 60, "{accepted:?}");
    // Shares and variables have names of the administrator's.
    let described = described(page("sublet-config")).into_iter().filter(|key| !key.starts_with("grant.env."));
    let described: BTreeSet<String> = described.map(|key| key.replace("share.small", "share")).collect();
    assert_eq!(described, accepted);
    assert_eq!(of_text("[grant.env]\nzzz = \"1\"\n").0.unwrap().grant.env["zzz"], "1");
}

#[test]
fn the_page_of_containers_describes_each_key_that_there_is() {
    let refusal = |text: &str| parse_containers(Path::new("f"), text).unwrap_err().to_string();
    let accepted = accepted(refusal);
    assert_eq!(accepted.len(), 6, "{accepted:?}");
    assert_eq!(described(page("sublet-containers")), accepted);
}

#[test]
fn examples_are_accepted() {
    for text in examples(page("sublet-config")) {
        let config = of_text(&text).0.unwrap_or_else(|error| panic!("{error}: {text}"));
        assert_ne!(config, Config::default(), "{text}");
    }
    for text in examples(page("sublet-containers")) {
        let (is_rules, is_config) = (parse_containers(Path::new("f"), &text), of_text(&text).0);
        assert!(is_rules.is_ok() || is_config.is_ok(), "{is_rules:?} {is_config:?}");
    }
    let mut asked = 0;
    for text in examples(page("sublet-annotations")) {
        let words = text
            .split([' ', '\n', '\''])
            .filter_map(|word| word.split_once('=').filter(|_| word.starts_with("sublet.")));
        let lines = text
            .lines()
            .filter_map(|line| line.trim().split_once(": ").filter(|(key, _)| key.starts_with("sublet.")));
        let annotations: Vec<_> =
            words.chain(lines.map(|(key, value)| (key, value.trim_matches('"')))).collect();
        assert_eq!(refusal_of(annotations.iter().copied()), None, "{text}");
        asked += usize::from(!annotations.is_empty());
    }
    assert!(asked > 6);
}

#[test]
fn a_page_reads_as_a_manual_page() {
    for page in &PAGES {
        let text = page.render().unwrap();
        let sections: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix(".SH ")).collect();
        assert_eq!(sections[..3], ["NAME", "SYNOPSIS", "DESCRIPTION"], "{}", page.name);
        assert_eq!(sections[sections.len() - 3..], ["EXAMPLES", "FILES", "\"SEE ALSO\""], "{}", page.name);
        assert!(text.is_ascii(), "not on every terminal: {text}");
        let mut is_code = false;
        for line in text.lines() {
            is_code = line == ".EX" || is_code && line != ".EE";
            assert!(
                is_code || !line.contains("](") && !line.contains(['`', '|']),
                "Markdown is left: {line}"
            );
            // man(1) sets a section in by 7 and code by 4 more.
            assert!(
                !is_code || line.replace(r"\-", "-").chars().count() <= 69,
                "too long for a terminal: {line}"
            );
        }
    }
}

#[test]
fn pages_name_each_other() {
    let commands = sublet::commands::command();
    let mut pages: Vec<(String, String)> =
        vec![("sublet.1".to_owned(), String::from_utf8(of_command(&Man::new(commands)).unwrap()).unwrap())];
    pages.extend(PAGES.iter().map(|page| (page.file_name(), page.render().unwrap())));
    for (file, text) in [
        ("sublet-hook.8", include_str!("../../../man/sublet-hook.8")),
        ("sublet-runtime.8", include_str!("../../../man/sublet-runtime.8")),
    ] {
        pages.push((file.to_owned(), text.to_owned()));
    }
    assert_eq!(pages.len(), SEE_ALSO.len());
    for (file, text) in pages {
        let see_also = text
            .split_once("SEE ALSO")
            .unwrap()
            .1
            .replace([' ', '\n'], "")
            .replace(r"\fB", "")
            .replace(r"\fR", "")
            .replace(".BR", "");
        for (name, section) in SEE_ALSO {
            let named = format!("{}({section})", name.replace('-', r"\-"));
            assert_eq!(see_also.contains(&named), file != format!("{name}.{section}"), "{file}: {named}");
        }
    }
}
