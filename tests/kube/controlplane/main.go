// One program for a whole cluster: kube-apiserver, kube-controller-manager, kube-scheduler (with
// coscheduling), kubelet, kube-proxy and kubectl, as the first argument says. They share most of
// their code, so that one link step and one binary take a fraction of the time and space of six.
package main

import (
	"context"
	"fmt"
	"os"
	"sort"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
	_ "sigs.k8s.io/scheduler-plugins/apis/config/scheme" // reads CoschedulingArgs
	"sigs.k8s.io/scheduler-plugins/pkg/coscheduling"
)

var components = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": controllers.NewControllerManagerCommand,
	"kube-proxy":              proxy.NewProxyCommand,
	"kube-scheduler": func() *cobra.Command {
		return scheduler.NewSchedulerCommand(scheduler.WithPlugin(coscheduling.Name, coscheduling.New))
	},
	"kubectl": kubectl.NewDefaultKubectlCommand,
	"kubelet": func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
}

func main() {
	if len(os.Args) > 1 {
		if command, known := components[os.Args[1]]; known {
			os.Args = os.Args[1:]
			os.Exit(cli.Run(command()))
		}
	}
	names := make([]string, 0, len(components))
	for name := range components {
		names = append(names, name)
	}
	sort.Strings(names)
	fmt.Fprintln(os.Stderr, "usage: controlplane", strings.Join(names, "|"), "[flags]")
	os.Exit(2)
}
