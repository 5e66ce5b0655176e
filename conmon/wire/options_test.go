package wire

import (
	"bytes"
	"reflect"
	"strings"
	"testing"
)

func TestArgs(t *testing.T) {
	o := Options{
		ID: "id", Dir: "/run/d", PidFile: "/p", ExitFile: "/e", LogFile: "/l/c/f", LogDir: "/l", LogRate: 1000, LogBurst: 5, LogMost: 7, Journal: "/j", JournalFields: []string{"A=b=c", "D="}, Terminal: true, Stdin: true, StdinOnce: true, Helpers: true, Guest: true,
		Start: []string{"/r", "start now"}, Wait: []string{"/r", "--x=y"}, Runtime: []string{"/usr/bin/runc", "create", "--", "id"},
	}
	want := "--id=id --dir=/run/d --pid-file=/p --exit-file=/e --log-file=/l/c/f --log-dir=/l --journal=/j --log-rate=1000 --log-burst=5 --log-most=7 --terminal --stdin --stdin-once --helpers --guest " +
		"--journal-field=A=b=c --journal-field=D= --start=/r --start=start now --wait=/r --wait=--x=y -- /usr/bin/runc create -- id"
	if got := strings.Join(o.Args(), " "); got != want {
		t.Errorf("%s, want\n%s", got, want)
	}
	if got, err := ParseArgs(o.Args()); err != nil || !reflect.DeepEqual(got, o) {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestBadArgs(t *testing.T) {
	const good = "--id=i --dir=d --pid-file=p --exit-file=e"
	if _, err := ParseArgs(strings.Fields(good + " -- x")); err != nil {
		t.Fatal(err)
	}
	for line, want := range map[string]string{
		"":                                       "end without --",
		good:                                     "end without --",
		good + " --":                             "no runtime command",
		good + " --terminal=yes -- x":            "unknown argument --terminal=yes",
		good + " --colour=red -- x":              "unknown argument --colour=red",
		good + " --log-file -- x":                "unknown argument --log-file",
		good + " x -- x":                         "unknown argument x",
		good + " --log-rate=-1 -- x":             "unknown argument --log-rate=-1",
		good + " --log-burst=1K -- x":            "unknown argument --log-burst=1K",
		good + " --log-burst=1099511627776 -- x": "unknown argument --log-burst=1099511627776",
		"--dir=d --pid-file=p --exit-file=e -- x":    "--id is missing",
		"--id= --dir=d --pid-file=p -- x":            "--id is missing",
		"--id=i --pid-file=p --exit-file=e -- x":     "--dir is missing",
		"--id=i --dir=d --exit-file=e -- x":          "--pid-file is missing",
		"--id=i --dir=d --pid-file=p -- x":           "--exit-file is missing",
		"--id=i --dir=d --pid-file=p exit-file -- x": "unknown argument exit-file",
	} {
		if o, err := ParseArgs(strings.Fields(line)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %+v, %v", line, o, err)
		}
	}
}

func FuzzArgs(f *testing.F) {
	f.Add("id", "/dir", "/log", "/start", "runc create", true)
	f.Add("--", "=", "--id=x", "", "-- --", false)
	f.Fuzz(func(t *testing.T, id, dir, log, start, runtime string, flag bool) {
		if id == "" || dir == "" {
			return
		}
		o := Options{ID: id, Dir: dir, PidFile: dir, ExitFile: log + "x", LogFile: log, Terminal: flag, Stdin: !flag,
			Start: []string{start}, Runtime: strings.Split(runtime, " ")}
		if got, err := ParseArgs(o.Args()); err != nil || !reflect.DeepEqual(got, o) {
			t.Errorf("%+v, %v", got, err)
		}
	})
}

// A process may have any command line. One that is accepted names a container
// and can be written again.
func FuzzHostileArgs(f *testing.F) {
	f.Add([]byte("--id=i\x00--dir=/d\x00--pid-file=p\x00--exit-file=e\x00--\x00runc\x00create\x00"))
	f.Add([]byte("--id=i\x00--id=\x00--start=\x00--start\x00--terminal=1\x00--\x00"))
	f.Add([]byte("--\x00--\x00"))
	f.Add([]byte("\xff=\x00=\x00\x00"))
	f.Fuzz(func(t *testing.T, line []byte) {
		var args []string
		for _, arg := range bytes.Split(line, []byte{0}) {
			args = append(args, string(arg))
		}
		o, err := ParseArgs(args)
		if err != nil {
			return
		}
		if o.ID == "" || o.Dir == "" || len(o.Runtime) == 0 {
			t.Errorf("%q is taken for the command line of a monitor: %+v", line, o)
		}
		if again, err := ParseArgs(o.Args()); err != nil || !reflect.DeepEqual(again, o) {
			t.Errorf("%+v became %+v, %v", o, again, err)
		}
	})
}
