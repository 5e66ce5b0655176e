package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/crius-run/crius/cmd/crius/config"
)

// page is a manual page in the man(7) macros.
type page struct{ b strings.Builder }

func newPage(name, section, summary string) *page {
	p := &page{}
	// No date: the page changes when its text does.
	fmt.Fprintf(&p.b, ".\\\" Written by `make generate`.\n.TH %s %s \"\" crius \"crius manual\"\n", strings.ToUpper(name), section)
	p.section("NAME")
	p.b.WriteString(roff(name) + ` \- ` + roff(summary) + "\n")
	return p
}

func (p *page) section(title string) {
	fmt.Fprintf(&p.b, ".SH \"%s\"\n", roff(title))
}

// text writes paragraphs, which are separated by empty lines.
func (p *page) text(text string) {
	for _, paragraph := range strings.Split(text, "\n\n") {
		fmt.Fprintf(&p.b, ".PP\n%s\n", roff(paragraph))
	}
}

// item writes a term in bold, the rest of its line, and its explanation.
func (p *page) item(term, rest, explanation string) {
	fmt.Fprintf(&p.b, ".TP\n\\fB%s\\fR%s\n%s\n", roff(term), roff(rest), roff(explanation))
}

func (p *page) writeTo(w io.Writer) error {
	_, err := io.WriteString(w, p.b.String())
	return err
}

// roff escapes text so that troff shows it literally.
func roff(text string) string {
	text = strings.NewReplacer(`\`, `\e`, `-`, `\-`, "`", `\(ga`, `'`, `\(aq`, `^`, `\(ha`, `~`, `\(ti`).Replace(text)
	if strings.HasPrefix(text, ".") {
		text = `\&` + text
	}
	return text
}

// writeProgramPage writes crius(8).
func writeProgramPage(w io.Writer, root *cobra.Command) error {
	p := newPage("crius", "8", root.Short)
	p.section("SYNOPSIS")
	p.item("crius", " [options] [command]", "")
	p.section("DESCRIPTION")
	p.text(root.Long)
	p.section("COMMANDS")
	for _, c := range root.Commands() {
		if c.Hidden || c.Name() == "help" {
			continue
		}
		p.command(c, c.Use)
		for _, below := range c.Commands() {
			p.command(below, c.Name()+" "+below.Use)
		}
	}
	p.section("OPTIONS")
	p.text("Each key of the configuration has a flag of the same name, with dashes for dots and underscores; a flag overrides all files. " +
		"The flag of a list takes one item: repeat it for several, pass it empty for none.")
	root.LocalFlags().VisitAll(func(f *pflag.Flag) {
		if f.Name != "help" {
			p.flag(f)
		}
	})
	p.section("BROKEN CONFIGURATION")
	p.text("With an invalid configuration no server starts; a running server keeps the configuration it loaded last. " +
		"Commands that ask it, such as status and logs, then locate it by the values that are valid, with a warning on standard error; if that fails, pass --api-listen and --run-root. " +
		"config, check and wipe fail: with wrong values wipe could remove the wrong directories.")
	p.section("LOG")
	p.text("The log goes to standard error. If standard error is connected to the journal, as in the systemd unit, each line carries its priority: " +
		"journalctl -u crius -p warning shows warnings and errors. Text lines are then written without the time, which the journal has itself.")
	p.section("SIGNALS")
	p.item("SIGTERM, SIGINT", "", "Finish the requests in progress and exit; containers keep running. A second signal exits at once.")
	p.item("SIGHUP", "", "Reload the configuration, as crius reload does, which also tells whether it was accepted: "+reloaded())
	p.item("SIGUSR1", "", "Write the stacks of all goroutines to "+stacksFile+" in run_root; the log names the file. "+
		"Unlike crius status goroutines, this also works while the server is starting or stopping.")
	p.section("EXIT STATUS")
	p.item("0", "", "Done.")
	p.item("1", "", "Failure; standard error has one line per problem.")
	p.item("2", "", "Invalid command line.")
	p.item("78", "", "crius serve rejected its configuration. The systemd unit does not restart it then.")
	p.text("crius exec exits with the code of its command.")
	p.section("FILES")
	p.item(config.DefaultFile, "", "Configuration file, see crius.toml(5).")
	p.item(config.DefaultFile+".d/*.toml", "", "Drop-in files, merged in the order of their names.")
	p.section("SEE ALSO")
	p.text("crius.toml(5), crictl(1), runc(8), crun(1), containers-registries.conf(5), containers-policy.json(5)")
	return p.writeTo(w)
}

// command writes a command with its own flags.
func (p *page) command(c *cobra.Command, term string) {
	about := c.Long
	if about == "" {
		about = c.Short + "."
	}
	p.item(term, "", about)
	c.LocalNonPersistentFlags().VisitAll(func(f *pflag.Flag) {
		if f.Name != "help" {
			fmt.Fprintf(&p.b, ".RS\n")
			p.flag(f)
			fmt.Fprintf(&p.b, ".RE\n")
		}
	})
}

// flag writes a flag with its value's type, its help and its default.
func (p *page) flag(f *pflag.Flag) {
	term, rest, about := "--"+f.Name, "", f.Usage+"."
	if f.Shorthand != "" {
		term = "-" + f.Shorthand + ", " + term
	}
	if kind := f.Value.Type(); kind == "bool" || kind == "boolean" {
		if f.DefValue == "true" {
			about += " On by default."
		} else {
			about += " Off by default."
		}
	} else {
		rest = " " + kind
		if f.DefValue != "" {
			about += " Default: " + f.DefValue + "."
		}
	}
	p.item(term, rest, about)
}

// writeConfigPage writes crius.toml(5).
func writeConfigPage(w io.Writer) error {
	p := newPage("crius.toml", "5", "Configuration of crius")
	p.section("DESCRIPTION")
	p.text("crius reads " + config.DefaultFile + ", then the files *.toml of " + config.DefaultFile + ".d in the order of their names, then its command line flags. " +
		"Later values override earlier ones. Tables, including those of runtime handlers, merge key by key; a list replaces the earlier list. Every file is optional.\n\n" +
		"The files are TOML. An unknown key or a value of the wrong type is an error: the server does not start, and reports the file, line and key. " +
		"Durations are strings such as \"1m30s\", permission bits octal numbers such as 0o660.\n\n" +
		"crius config prints the effective configuration and the origin of each value; crius config --default prints a commented file to start from.")
	for _, s := range config.Schema() {
		if s.Path == "" {
			p.section("TOP LEVEL")
		} else {
			p.section("[" + s.Path + "]")
			p.text(strings.TrimSuffix(s.Help, ".") + ".")
		}
		for _, k := range s.Keys {
			p.item(k.Name(), " = "+k.TOML(), k.Help+"."+whenItTakesEffect(k))
		}
	}
	p.section("SEE ALSO")
	p.text("crius(8), containers-storage.conf(5), containers-registries.conf(5), containers-policy.json(5)")
	return p.writeTo(w)
}

// whenItTakesEffect completes the text of an option that a reload does not apply.
func whenItTakesEffect(k config.Key) string {
	if why := k.WhyRestart(); why != "" {
		return " A change takes effect after a restart: " + why + "."
	}
	return ""
}
