# Hide secrets in the lines of a log, as src/hpctrain/files/redaction.py does, which says what they are. Words
# of a command are quoted by quote_words of main.sh.
#
# usage: awk -f redaction.awk src/hpctrain/files/secret_names.txt - <TEXT. Without names all values are hidden.

FILENAME == ARGV[1] {
    if ($1 !~ /^#/) {
        kinds[++rules] = $1
        words[rules] = $2
    }
    next
}

!began {
    began = 1
    for (name in ENVIRON) {
        if (length(ENVIRON[name]) >= 6 && is_secret(name)) values[ENVIRON[name]]
    }
}

{
    text = $0
    # the longest first: a shorter one may be a part of it
    for (value in values) ordered[length(value), value] = value
    while ((value = longest()) != "") {
        quoted = value
        gsub(/[^A-Za-z0-9_.\/:=@%+,-]/, "\\\\&", quoted)
        text = replace(replace(text, value), quoted)
    }
    print hide_options(hide_urls(text))
}

function is_secret(name,    number, word, at) {
    name = toupper(name)
    gsub(/-/, "_", name)
    for (number = 1; number <= rules; number++) {
        word = words[number]
        while (at = index(name, word)) {
            if (kinds[number] == "secret") return 1
            name = substr(name, 1, at - 1) "." substr(name, at + length(word))
        }
    }
    return !rules
}

function longest(    key, found) {
    for (key in ordered) {
        if (length(ordered[key]) > length(found)) found = ordered[key]
    }
    delete ordered[length(found), found]
    return found
}

function replace(text, value,    at, done) {
    while (at = index(text, value)) {
        done = done substr(text, 1, at - 1) "***"
        text = substr(text, at + length(value))
    }
    return done text
}

# USER:PASSWORD@ and TOKEN@; a password may have @ and /
function hide_urls(text,    done) {
    while (match(text, /:\/\//)) {
        done = done substr(text, 1, RSTART + 2)
        text = substr(text, RSTART + 3)
        if (match(text, /^[^ \/@:]*:[^ ]*@/) || match(text, /^[^ \/@]+@/)) {
            done = done "***@"
            text = substr(text, RLENGTH + 1)
        }
    }
    return done text
}

# NAME=VALUE and --NAME VALUE
function hide_options(text,    done, name) {
    while (match(text, /[A-Za-z0-9_-]+(=| +)/)) {
        name = substr(text, RSTART, RLENGTH)
        done = done substr(text, 1, RSTART + RLENGTH - 1)
        text = substr(text, RSTART + RLENGTH)
        if ((name ~ /^--/ || name ~ /=$/) && is_secret(name) && match(text, /^(\\.|[^ \\])+/)) {
            done = done "***"
            text = substr(text, RLENGTH + 1)
        }
    }
    return done text
}
