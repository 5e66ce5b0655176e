package records

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/conmon"
	"github.com/crius-run/crius/internal/fault"
	"github.com/crius-run/crius/internal/record"
	"github.com/crius-run/crius/storage"
)

// Records that a server of commit 9851b21 has written, with every field set, are
// read by this one, and what this one writes of them that one could read again:
// the documents are the same but for their white space and the order of fields.
func TestRecordsOfEarlierServersAreRead(t *testing.T) {
	const podID = "11112222333344445555666677778888999900001111222233334444555566aa"
	const ctrID = "99998888777766665555444433332222111100009999888877776666555544bb"
	at := time.Date(2026, 11, 22, 16, 30, 0, 123456789, time.UTC)

	pod := readEarlier[Pod](t, podID, "pod")
	config := pod.Config.M
	if config.GetMetadata().GetName() != "web" || config.GetLinux().GetSecurityContext().GetNamespaceOptions().GetPid() != cri.NamespaceMode_POD || config.GetPortMappings()[0].GetHostPort() != 8080 {
		t.Errorf("pod: request %v", config)
	}
	if pod.Phase != Ready || pod.Handler != "runc" || !pod.CreatedAt.Equal(at) || !strings.HasPrefix(pod.BootID, "0b52d1f2") || !pod.Infra || !pod.Sandboxed || pod.OwnFiles || pod.CgroupPrefix != "crio" {
		t.Errorf("pod: %+v", pod)
	}
	if n := pod.Namespaces; n.Name != "crius-"+podID || !n.Net || !n.IPC || !n.UTS || n.UIDs[0].Host != 65536 || n.GIDs[0].Size != 65536 || len(n.Sysctls) != 1 {
		t.Errorf("pod: namespaces %+v", n)
	}
	if n := pod.Network; n.Network != "bridge" || n.NetNSInode != 4026532567 || n.IPs[0] != "10.88.0.7" || n.HostPorts[0].HostPort != 8080 || len(n.Conf) == 0 || len(n.Result) == 0 {
		t.Errorf("pod: network %+v", n)
	}
	if updated := pod.Current().GetLinux(); updated.GetOverhead().GetMemoryLimitInBytes() != 64<<20 || updated.GetResources().GetCpuShares() != 512 {
		t.Errorf("pod: updated to %v", updated)
	}

	ctr := readEarlier[Container](t, ctrID, "container")
	if c := ctr.Config.M; c.GetMetadata().GetName() != "nginx" || len(c.GetCommand()) != 3 || !c.GetMounts()[0].GetReadonly() {
		t.Errorf("container: request %v", c)
	}
	if ctr.Phase != Started || ctr.SandboxID != podID || ctr.Handler != "runc" || !strings.HasPrefix(ctr.ImageID, "sha256:0123") || !strings.Contains(ctr.ImageRef, "nginx@sha256:") {
		t.Errorf("container: %+v", ctr)
	}
	if !ctr.CreatedAt.Equal(at.Add(time.Second)) || !ctr.StartedAt.Equal(at.Add(2*time.Second)) || ctr.LogPath != "/var/log/pods/shop_web/nginx/1.log" || !strings.HasSuffix(ctr.Cgroup, ctrID) || ctr.CgroupsPath != ctr.Cgroup || ctr.MountLabel == "" {
		t.Errorf("container: %+v", ctr)
	}
	if len(ctr.Volumes) != 1 || ctr.Mounts()[0].GetImage().GetImageRef() != "sha256:aa" {
		t.Errorf("container: volumes %+v", ctr.Volumes)
	}
	if ctr.Resources.M.GetCpuQuota() != 50000 || ctr.User.M.GetLinux().GetUid() != 101 || ctr.StopSignal != cri.Signal_SIGNAL_SIGQUIT || ctr.StopNumber != 3 || ctr.StartError == "" {
		t.Errorf("container: %+v", ctr)
	}
}

// readEarlier reads testdata's record of a kind as a server does, writes it again,
// and compares the two documents.
func readEarlier[T any](t *testing.T, id, kind string) *T {
	t.Helper()
	earlier, err := os.ReadFile(filepath.Join("testdata", kind+"-9851b21.json"))
	if err != nil {
		t.Fatal(err)
	}
	docs := record.At[T](t.TempDir(), "doc.json", Version)
	file := filepath.Join(docs.Path(id), "doc.json")
	if err := os.Mkdir(docs.Path(id), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, earlier, 0o600); err != nil {
		t.Fatal(err)
	}
	doc, err := docs.Get(id)
	if err != nil {
		t.Fatalf("%s: %v", kind, err)
	}
	if err := docs.Put(t.Context(), id, doc); err != nil {
		t.Fatal(err)
	}
	if err := docs.Sync(); err != nil {
		t.Fatal(err)
	}
	again, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var was, is any
	if err := json.Unmarshal(earlier, &was); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(again, &is); err != nil {
		t.Fatal(err)
	}
	if volumes, has := was.(map[string]any)["body"].(map[string]any)["Volumes"].([]any); has {
		delete(volumes[0].(map[string]any), "ImageRef") // which no server reads any more
	}
	if !reflect.DeepEqual(was, is) {
		t.Errorf("%s: the record\n%s became\n%s", kind, earlier, again)
	}
	return doc
}

// The image store tells the references of volumes, which may be OCI artifacts, from those
// of root file systems.
func TestImagesInUse(t *testing.T) {
	plan := ContainerPlan{ImageID: "image", Volumes: []Volume{{Mount: 2, ImageID: "artifact"}}}
	want := []storage.Rootfs{{ID: "c", ImageID: "image"}, {ID: "c-volume-2", ImageID: "artifact", ReadOnly: true}}
	if got := plan.ImagesInUse("c"); !slices.Equal(got, want) {
		t.Errorf("in use: %+v", got)
	}
}

// The message of an end tells by when kills were noticed: with the command, if that of an exec ended
// then.
func TestEndOfForeignProgramIsExplained(t *testing.T) {
	t.Parallel()
	foreign := ContainerPlan{Foreign: "s390x"}
	if text := foreign.Explain(1, true, ""); !strings.Contains(text, "the image is for s390x and this node is ") {
		t.Errorf("%q", text)
	}
	for want, got := range map[string]string{
		"":       foreign.Explain(0, true, ""),
		"killed": foreign.Explain(1, true, "killed"),
		"\x00":   new(ContainerPlan).Explain(1, true, "\x00"),
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestEndingSaysWhenTheOOMKillerWasNoticed(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 11, 22, 16, 30, 0, 0, time.UTC)
	seen := conmon.OOMSeen{Kills: 1, At: at.Unix()}
	exec := &OOMExec{Kills: 2, At: at.Add(time.Minute), Command: "sh -c sort"}
	for want, c := range map[string]struct {
		exit conmon.Exit
		exec *OOMExec
	}{
		"": {conmon.Exit{}, nil},
		"1 process of the container before it ended, not its first one":                                                                                            {conmon.Exit{OOMKills: 1}, nil},
		"1 process of the container before it ended, not its first one: 1 by 2026-11-22T16:30:00Z":                                                                 {conmon.Exit{OOMKills: 1, OOMSeen: seen}, nil},
		`2 processes of the container before it ended, not its first one: 2 by 2026-11-22T16:31:00Z, when the command "sh -c sort" of an exec ended with code 137`: {conmon.Exit{OOMKills: 2, OOMSeen: seen}, exec},
		"3 processes of the container before it ended, not its first one: 3 by 2026-11-22T16:30:00Z":                                                               {conmon.Exit{OOMKills: 3, OOMSeen: conmon.OOMSeen{Kills: 3, At: at.Unix()}}, exec},
	} {
		if want != "" {
			want = "the OOM killer killed " + want
		}
		state := ContainerState{OOMExec: c.exec}
		if _, _, message := state.Ending(c.exit); message != want {
			t.Errorf("%q, want %q", message, want)
		}
	}
}

// asking is the plan of a container whose request has this security context.
func asking(sc *cri.LinuxContainerSecurityContext) *ContainerPlan {
	return &ContainerPlan{Config: Message[*cri.ContainerConfig]{M: &cri.ContainerConfig{Linux: &cri.LinuxContainerConfig{SecurityContext: sc}}}}
}

var (
	localhost = &cri.LinuxContainerSecurityContext{Seccomp: &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: "/profiles/own.json"}}
	byDefault = &cri.LinuxContainerSecurityContext{Seccomp: &cri.SecurityProfile{}}
	without   = &cri.LinuxContainerSecurityContext{Seccomp: &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Unconfined}}
)

// A process that a filter kills says nothing, and exit code 159 is known to few.
func TestEndBySeccompIsExplained_crio_5720(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		security *cri.LinuxContainerSecurityContext
		code     int32
		started  bool
		want     string
	}{
		{localhost, 159, true, "killed by SIGSYS: the seccomp profile /profiles/own.json forbids"},
		{byDefault, 159, true, "killed by SIGSYS: the seccomp profile RuntimeDefault forbids"},
		{without, 159, true, ""},
		{localhost, 1, true, ""},
		{localhost, 0, false, ""},
		{localhost, 255, false, "it ended before it was started: its seccomp profile /profiles/own.json may forbid"},
		{byDefault, 255, false, ""},
		{localhost, 137, false, ""}, // it was stopped
	} {
		if got := asking(c.security).Explain(c.code, c.started, ""); !strings.HasPrefix(got, c.want) || (got == "") != (c.want == "") {
			t.Errorf("code %d, started %v: %q, want %q", c.code, c.started, got, c.want)
		}
	}
}

// What runc and crun say when a filter stops them names neither the filter nor the profile.
func TestProfileIsBlamed_syscall2seccomp_1(t *testing.T) {
	t.Parallel()
	const blame = "; its seccomp profile /profiles/own.json may forbid"
	for _, c := range []struct {
		security *cri.LinuxContainerSecurityContext
		err      error
		blamed   bool
	}{
		{localhost, errors.New("runc start: exit status 1: cannot start a container that has stopped"), true},
		{localhost, errors.New("crun create: prctl drop bounding: Operation not permitted"), true},
		{localhost, fmt.Errorf("runc did not create the container within 4m: %w", fault.Timeout), true},
		{localhost, errors.New("runc create: mkdir /v: read-only file system"), false},
		{localhost, fmt.Errorf("exec /x: operation not permitted: %w", fault.Precondition), false},
		{byDefault, errors.New("runc start: exit status 1: cannot start a container that has stopped"), false},
		{without, errors.New("crun create: read from the init process"), false},
	} {
		got := asking(c.security).BlameProfile(c.err)
		if !errors.Is(got, c.err) || strings.Contains(got.Error(), blame) != c.blamed {
			t.Errorf("%v became %v", c.err, got)
		}
	}
	if err := asking(localhost).BlameProfile(nil); err != nil {
		t.Error(err)
	}
}
