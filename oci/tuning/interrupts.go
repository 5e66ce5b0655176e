package tuning

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// This file keeps interrupts off CPUs: new interrupts by the kernel's default
// mask, and existing ones by irqbalance, which moves them.

const (
	defaultMask = "/proc/irq/default_smp_affinity"
	irqbalance  = "irqbalance.service"
)

// Variables of irqbalance's configuration: versions before 1.8 know only the
// first, current ones the second.
const (
	bannedMask = "IRQBALANCE_BANNED_CPUS="
	bannedList = "IRQBALANCE_BANNED_CPULIST="
)

// bannedLines are the original lines of irqbalance's configuration; nil if
// there was no file.
type bannedLines struct {
	File  string   `json:"File,omitempty"`
	Lines []string `json:"Lines,omitempty"`
}

func (t *Tuner) readMask() (Set, error) {
	text, err := t.read(defaultMask)
	if err != nil {
		return nil, fmt.Errorf("read mask of interrupts: %w", err)
	}
	return parseMask(text)
}

func (t *Tuner) noteInterrupts(next *changes, c claim) error {
	if len(c.Quiet) == 0 {
		return nil
	}
	mask, err := t.readMask()
	if err != nil {
		return err
	}
	if len(mask.plus(next.back()).minus(c.Quiet)) == 0 {
		return invalid("no CPU would be left for interrupts: they go to %s, and the container wants none on %s", mask, c.Quiet)
	}
	next.Interrupts = next.Interrupts.plus(mask.and(c.Quiet))
	if next.Irqbalance == nil {
		next.Irqbalance, err = t.findBanned()
	}
	next.Rebalance = len(t.IrqbalanceFiles) > 0
	return err
}

// silence removes CPUs from the mask of interrupts.
func (t *Tuner) silence(c claim) error {
	if len(c.Quiet) == 0 {
		return nil
	}
	mask, err := t.readMask()
	if err != nil {
		return err
	}
	mask = mask.minus(c.Quiet)
	if err := t.write(defaultMask, mask.mask()); err != nil {
		return fmt.Errorf("keep interrupts off CPUs %s: %w", c.Quiet, err)
	}
	return t.ban(t.now)
}

// quiet returns the CPUs that get no interrupts.
func (c *changes) quiet() (quiet Set) {
	for _, one := range c.Containers {
		quiet = quiet.plus(one.Quiet)
	}
	return quiet
}

// back returns the CPUs that got no interrupts, and whose containers no longer mind.
func (c *changes) back() Set { return c.Interrupts.minus(c.quiet()) }

// settleInterrupts gives CPUs that no container needs quiet back to interrupts.
func (t *Tuner) settleInterrupts(next *changes) error {
	quiet, back := next.quiet(), next.back()
	next.Interrupts = next.Interrupts.and(quiet)
	if len(back) > 0 {
		mask, err := t.readMask()
		if err != nil {
			return err
		}
		mask = mask.plus(back)
		if err := t.write(defaultMask, mask.mask()); err != nil {
			return fmt.Errorf("let interrupts go to CPUs %s: %w", back, err)
		}
	}
	before := next.Irqbalance
	if before == nil || len(quiet) > 0 && len(back) == 0 {
		return nil
	}
	next.Rebalance = len(t.IrqbalanceFiles) > 0
	if len(quiet) > 0 {
		return t.ban(next)
	}
	next.Irqbalance = nil
	err := t.replaceBanned(before.File, before.Lines)
	if err == nil {
		t.askRebalance()
	}
	return err
}

// ban makes irqbalance leave alone the CPUs that are not in the mask, and those
// that it left alone before. With a configuration it does not find isolated
// CPUs by itself.
func (t *Tuner) ban(now *changes) error {
	banned, err := t.toBan(now)
	if err != nil {
		return err
	}
	if err := t.replaceBanned(now.Irqbalance.File, assignments(banned, `"`)); err != nil {
		return err
	}
	t.askRebalance()
	return nil
}

// toBan returns the CPUs that irqbalance must leave alone: while crius has
// changed nothing, those of its configuration.
func (t *Tuner) toBan(now *changes) (Set, error) {
	if now.Irqbalance == nil {
		lines, err := t.findBanned()
		if err != nil {
			return nil, err
		}
		return lines.cpus(), nil
	}
	mask, err := t.readMask()
	if err != nil {
		return nil, err
	}
	text, err := t.read("/sys/devices/system/cpu/online")
	if err != nil {
		return nil, fmt.Errorf("find online CPUs: %w", err)
	}
	online, err := ParseSet(text)
	if err != nil {
		return nil, err
	}
	return now.Irqbalance.cpus().plus(online.minus(mask)), nil
}

// assignments returns the assignments of both variables.
func assignments(banned Set, quote string) []string {
	return []string{bannedMask + quote + banned.mask() + quote, bannedList + quote + banned.String() + quote}
}

// askRebalance requires mu. The request is on record, or will be: the next
// server repeats it if this one dies too early.
func (t *Tuner) askRebalance() {
	if len(t.IrqbalanceFiles) > 0 {
		t.asked++
		t.Later("irqbalance", t.rebalance)
	}
}

// rebalance makes irqbalance look at its CPUs again, once for all requests so
// far. Without it existing interrupts stay where they are. That is no reason to
// refuse a container or to make others wait.
func (t *Tuner) rebalance(ctx context.Context) error {
	t.rebalancing.Lock()
	defer t.rebalancing.Unlock()
	t.mu.Lock()
	asked, done := t.asked, t.rebalanced
	banned, err := t.toBan(t.now)
	t.mu.Unlock()
	if err != nil || asked == done {
		return err
	}
	if t.banned == nil || !slices.Equal(*t.banned, banned) { // a cleanup that fails asks each time
		if err := t.runIrqbalance(ctx, banned); err != nil && !errors.Is(err, exec.ErrNotFound) {
			return fmt.Errorf("restart irqbalance, interrupts may stay on the CPUs where they are: %w", err)
		}
		t.banned = &banned
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.asked == asked && t.now.Rebalance {
		next := t.now.clone()
		next.Rebalance = false
		if err := t.put(ctx, next); err != nil {
			return err
		}
	}
	t.rebalanced = asked
	return nil
}

func (t *Tuner) runIrqbalance(ctx context.Context, banned Set) error {
	err := t.Run(ctx, nil, "systemctl", "is-active", "--quiet", irqbalance)
	if err == nil {
		_ = t.Run(ctx, nil, "systemctl", "reset-failed", irqbalance) // otherwise systemd may refuse to start it so often
		return t.Run(ctx, nil, "systemctl", "restart", irqbalance)
	}
	if t.hasSystemd() && !saysInactive(err) {
		return err // it may be running
	}
	return t.Run(ctx, assignments(banned, ""), "irqbalance", "--oneshot")
}

// hasSystemd reports whether systemd runs, like sd_booted(3).
func (t *Tuner) hasSystemd() bool {
	_, err := os.Stat(filepath.Join(t.Root, "/run/systemd/system"))
	return err == nil
}

// saysInactive reports whether systemctl found the unit inactive, as opposed to
// failing to find out.
func saysInactive(err error) bool {
	const inactive, unknown = 3, 4
	exit, exited := errors.AsType[*exec.ExitError](err)
	return exited && (exit.ExitCode() == inactive || exit.ExitCode() == unknown)
}

// configuration returns the path of irqbalance's configuration; empty if there
// is none.
func (t *Tuner) configuration() string {
	lines, err := t.findBanned()
	if err != nil {
		return strings.Join(t.IrqbalanceFiles, " or ")
	}
	return lines.File
}

// findBanned reads the configuration of irqbalance.
func (t *Tuner) findBanned() (*bannedLines, error) {
	for _, file := range t.IrqbalanceFiles {
		text, err := os.ReadFile(filepath.Join(t.Root, file))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read configuration of irqbalance: %w", err)
		}
		lines := slices.DeleteFunc(strings.Split(string(text), "\n"), func(line string) bool { return !isBanned(line) })
		return &bannedLines{File: file, Lines: lines}, nil
	}
	return &bannedLines{}, nil
}

func isBanned(line string) bool {
	return strings.HasPrefix(line, bannedMask) || strings.HasPrefix(line, bannedList)
}

// cpus returns the CPUs in the lines, as irqbalance would parse them.
func (b *bannedLines) cpus() (banned Set) {
	for _, line := range b.Lines {
		name, value, _ := strings.Cut(line, "=")
		parse := ParseSet
		if name+"=" == bannedMask {
			parse = parseMask
		}
		cpus, _ := parse(strings.Trim(value, `"' `))
		banned = banned.plus(cpus)
	}
	return banned
}

// replaceBanned replaces the configuration's lines for banned CPUs.
func (t *Tuner) replaceBanned(file string, lines []string) error {
	if file == "" {
		return nil
	}
	path, err := filepath.EvalSymlinks(filepath.Join(t.Root, file))
	if errors.Is(err, fs.ErrNotExist) {
		return nil // irqbalance was removed
	}
	var text []byte
	if err == nil {
		text, err = os.ReadFile(path)
	}
	if err == nil {
		err = replaceFile(path, withLines(string(text), lines))
	}
	if err != nil {
		return fmt.Errorf("change configuration of irqbalance: %w", err)
	}
	return nil
}

// withLines returns the text with other lines for banned CPUs, in place of the
// first of the old ones.
func withLines(text string, lines []string) string {
	all := strings.Split(text, "\n")
	at := slices.IndexFunc(all, isBanned)
	if at < 0 {
		at = len(all)
		if all[at-1] == "" { // after the last line's end
			at--
		} else {
			lines = append(slices.Clone(lines), "")
		}
	}
	return strings.Join(slices.Concat(all[:at], lines, slices.DeleteFunc(all[at:], isBanned)), "\n")
}

// replaceFile replaces a file atomically and keeps its mode.
func replaceFile(path, text string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".crius-*")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(f.Name()) }() // a no-op after the rename
	_, err = f.WriteString(text)
	err = errors.Join(err, f.Chmod(info.Mode().Perm()), f.Sync(), f.Close())
	if err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
